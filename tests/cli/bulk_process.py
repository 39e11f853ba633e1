"""`python bulk_process.py ROWS OUT MOMENT`: run a prompts file over the tiny pair, and be killed at a moment.

A number: by SIGKILL in that step of the engine. "write": by the system, at the first write to any file."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
import sys
from pathlib import Path

from tests.conftest import engine_config, tiny_models
from tests.engine.test_stops import letters

from aquiline.config import SamplingParams
from aquiline.engine.bulk import BulkRun
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import Chain


def main() -> None:
    rows, out, moment = sys.argv[1:]
    llm = LLM.from_models(dataclasses.replace(tiny_models(), tokenizer=letters()), engine_config(3), Chain(3))
    step, num_steps = llm.engine.step, 0

    def dies() -> object:
        nonlocal num_steps
        num_steps += 1
        if str(num_steps) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return step()

    llm.engine.step = dies  # type: ignore[assignment,method-assign]
    if moment == "write":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python would make an error of it
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    BulkRun(Path(rows), Path(out), SamplingParams(max_tokens=30, ignore_eos=True), {"target": None}).run(llm)


if __name__ == "__main__":
    main()

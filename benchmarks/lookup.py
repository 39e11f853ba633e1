"""What a lookup costs the host per step and sequence, and what it drafts: three texts, both indexes, no model.

A text of the bundled target's tokens is written step by step as verification would write it: the proposer sees prompt
and output, drafts, and the step commits what it drafted rightly and one token more. So the time of a step covers the
tokens that it indexes and the draft that it copies. "edited" is the prompt again with every 40th token changed,
"predicted" the same with the prompt as the prediction, "new" is another text.

"native" is the index of the native library, "python" its readable twin. A step of a model leaves little of an index in
the caches, so "cold" steps are timed too: before each of them, more memory is read than the caches next to a core hold.
Ends with one JSON line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np

from aquiline.backends.cpu import calls
from aquiline.backends.cpu.native_text_index import NativeIndex
from aquiline.bench.data.prompts import text_prompts
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.spec.lookup import Lookup, LookupProposer, LookupShared
from aquiline.spec.text_index import NewIndex, SuffixIndex
from aquiline.text.tokenizer import load_tokenizer

NUM_PROMPT = 2000
ROUNDS = 20
NUM_COLD = 400
"""Cold steps that are timed, in one round."""

COLD_BYTES = 32 * 2**20


def steps(
    proposer: LookupProposer, prompt: list[int], output: list[int], before: Callable[[], object] = lambda: None
) -> np.ndarray:
    """Microseconds, tokens drafted and tokens committed of every step that writes the output, [steps, 3]; the first
    step indexes the prompt. before: what happens before each step, untimed."""
    max_draft = proposer.drafting.max_draft
    tokens, written, found = [*prompt, output[0]], 1, []
    while written < len(output):
        before()
        began = time.perf_counter()
        drafted = proposer.propose(tokens, max_draft).tokens
        took_us = (time.perf_counter() - began) * 1e6
        wanted = output[written : written + len(drafted)]
        right = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=False)) if a != b), len(wanted))
        tokens += output[written : written + right + 1]
        written += right + 1
        found.append((took_us, len(drafted), right + 1))
    return np.array(found)


def measure(new_index: NewIndex, prompt: list[int], output: list[int], prediction: list[int]) -> dict[str, float]:
    """Figures of one text and one index. The events of all rounds are shared, as those of an engine's requests are."""
    drafting, shared = Lookup(), LookupShared(new_index=new_index)
    memory = np.ones(COLD_BYTES // 8)

    def proposer() -> LookupProposer:
        return drafting.proposer(prompt, prediction, shared)

    rounds = [steps(proposer(), prompt, output) for _ in range(ROUNDS)][1:]
    first, later = np.array([r[0, 0] for r in rounds]), np.concatenate([r[1:] for r in rounds])
    cold = steps(proposer(), prompt, output[:NUM_COLD], memory.sum)[1:]
    full = later[later[:, 1] == drafting.max_draft]
    return {
        "index_us_per_token": float(np.median(first)) / (len(prompt) + len(prediction)),
        "step_us": float(np.median(later[:, 0])),
        "step_us_p99": float(np.quantile(later[:, 0], 0.99)),
        "cold_step_us": float(np.median(cold[:, 0])),
        "full_draft_step_us": float(np.median(full[:, 0])) if len(full) else 0.0,
        "drafted_per_step": float(later[:, 1].mean()),
        "committed_per_step": float(later[:, 2].mean()),
    }


def main() -> None:
    """Measure and print."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    prompt, new = (found.token_ids for found in text_prompts(NUM_PROMPT, 2, tokenizer))
    edited = [token if i % 40 else new[i] for i, token in enumerate(prompt)]
    texts: dict[str, tuple[list[int], list[int]]] = {
        "edited": (edited, []), "predicted": (edited, prompt), "new": (new, []),
    }  # fmt: skip
    indexes: dict[str, NewIndex] = {"python": SuffixIndex}
    if calls.missing_reason() is None:
        indexes = {"native": NativeIndex} | indexes
    shown: dict[str, dict[str, dict[str, float]]] = {}
    for index, new_index in indexes.items():
        shown[index] = {}
        for name, (output, prediction) in texts.items():
            shown[index][name] = figures = measure(new_index, prompt, output, prediction)
            print(index, name, {key: round(value, 2) for key, value in figures.items()})
    print(json.dumps(shown))


if __name__ == "__main__":
    main()

"""Steps an engine by hand, and what it should say: the text of a prompt that runs alone, without speculation."""

from __future__ import annotations

import numpy as np
from tests.conftest import TINY, tiny_llm
from tests.engine.test_exact import BASELINE, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Sequence, TokenDelta
from aquiline.spec.drafting import Drafting

MANY = 5000
"""Steps that no test here needs."""

PARAMS = SamplingParams(max_tokens=20, temperature=0.9, seed=11, ignore_eos=True)


def words(count: int, seed: int = 0) -> list[int]:
    """Random token ids, none of which ends a text."""
    return np.random.default_rng(seed).integers(1, TINY.vocab_size, count).tolist()


def add(
    llm: LLM, name: int | str, prompt: list[int], sampling: SamplingParams = PARAMS, drafting: Drafting = BASELINE,
    priority: int = 0,
) -> Sequence:  # fmt: skip
    """Queue a request."""
    return llm.engine.add(llm.request(name, prompt, sampling, drafting, priority))


def started(
    llm: LLM, name: int | str, prompt: list[int], sampling: SamplingParams = PARAMS, drafting: Drafting = BASELINE,
    priority: int = 0,
) -> Sequence:  # fmt: skip
    """A request that decodes: it has its first token."""
    sequence = add(llm, name, prompt, sampling, drafting, priority)
    while not sequence.output_ids:
        llm.engine.step()
    return sequence


def finish(llm: LLM) -> list[TokenDelta]:
    """Step until nothing is left; all deltas."""
    deltas = []
    for _ in range(MANY):
        if not llm.engine.is_busy:
            return deltas
        deltas += llm.engine.step()
    raise AssertionError(f"{len(llm.engine.sequences)} requests have not ended after {MANY} steps")


def ended(deltas: list[TokenDelta]) -> list[int | str]:
    """Ids of the requests that ended, in order."""
    return [delta.request_id for delta in deltas if delta.finish_reason is not None]


def alone(prompt: list[int], sampling: SamplingParams = PARAMS) -> list[int]:
    """The output of a prompt that nobody runs beside, without speculation."""
    return tokens(tiny_llm(max_batch=1).run([prompt], sampling, drafting=BASELINE))[0]

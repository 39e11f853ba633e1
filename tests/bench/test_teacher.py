"""Teacher-forced accuracy: its walk gives the tau of a real chain, for drafts that know all, nothing and something."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.oracle import deepest, teach

from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.eval.guesses import ChainTeacher, Guesses, accuracy
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.metrics import Counters
from aquiline.models.known_pairs import BUNDLED_PROMPTS
from aquiline.spec.drafting import Chain, Drafting

PROMPT = [5, 6, 7, 8, 9]
SAMPLINGS = [SamplingParams(max_tokens=40, ignore_eos=True), SamplingParams(max_tokens=40, temperature=0.9, seed=3)]


def chain(length: int) -> Drafting:
    return Chain(length)


def real_counters(llm: LLM, prompts: list[list[int]], sampling: SamplingParams, length: int) -> Counters:
    total = Counters()
    for prompt in prompts:
        total.merge(llm.run([prompt], sampling, drafting=chain(length)).summary.counters)
    return total


@pytest.mark.parametrize("wrong", [False, True], ids=["oracle", "adversary"])
@pytest.mark.parametrize("K", [1, 3, 5])
def test_a_draft_that_knows_the_text_and_one_that_knows_it_wrong(K: int, wrong: bool) -> None:
    llm = tiny_llm(max_batch=1)
    text = llm.run([PROMPT], SAMPLINGS[0]).outputs[0].token_ids
    judge = ChainTeacher(llm, len(PROMPT) + len(text))
    drafts = [(token + wrong) % TINY.vocab_size for token in text]
    for own in (llm, judge.llm):
        teach(own, [PROMPT + drafts], deepest)
    found = judge.guess(PROMPT, SAMPLINGS[0], K)
    assert found.token_ids == text, "accepting nothing leaves the target's own text"
    result = accuracy([found], K)
    assert result.marginal == [0.0 if wrong else 1.0] * K
    assert result.conditional == ([0.0] + [None] * (K - 1) if wrong else [1.0] * K)
    assert result.num_guesses == [len(text) - 1 - k for k in range(K)]
    real = llm.run([PROMPT], SAMPLINGS[0], drafting=chain(K)).summary.counters
    assert result.simulated_tau[-1] == real.tau == (1.0 if wrong else 39 / -(-39 // (K + 1)))


@needs_native
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled"])
def test_a_random_draft_is_as_bad_as_serving_finds_it(sampling: SamplingParams) -> None:
    llm = tiny_llm(max_batch=1)
    prompts = [[3 + i, 40 - i, 7 * i + 1] for i in range(12)]
    judge = ChainTeacher(llm, 64)
    found = [judge.guess(prompt, sampling, 4) for prompt in prompts]
    result = accuracy(found, 4)
    assert result.marginal[0] is not None and result.marginal[0] < 0.3
    for k in range(1, 5):
        assert result.simulated_tau[k - 1] == real_counters(llm, prompts, sampling, k).tau


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_bundled_draft_serves_as_simulated(temperature: float) -> None:
    """The bound on the native path is zero: at a position the draft reads the same numbers in either run."""
    llm = LLM("bundled", engine=EngineConfig(max_batch=1, prefix_cache=False))
    prompts = [llm.encode(prompt.text) for prompt in read_prompts(BUNDLED_PROMPTS)[:3]]
    sampling = SamplingParams(max_tokens=32, temperature=temperature, seed=1)
    judge = ChainTeacher(llm, max(map(len, prompts)) + 32)
    result = accuracy([judge.guess(prompt, sampling, 5) for prompt in prompts], 5)
    assert result.marginal[0] is not None and result.marginal[0] > 0.4, "a trained draft"
    for k in (1, 3, 5):
        real = real_counters(llm, prompts, sampling, k)
        assert result.simulated_tau[k - 1] == real.tau
        # the first place is judged at every position, serving sees only where its steps begin
        assert real.per_position[0] == pytest.approx(result.marginal[0], abs=0.25)


def test_a_text_of_one_token_says_nothing() -> None:
    llm = tiny_llm(max_batch=1)
    found = ChainTeacher(llm, 8).guess(PROMPT, SamplingParams(max_tokens=1), 3)
    result = accuracy([found], 3)
    assert found.right.shape == (0, 3) and result.num_guesses == [0, 0, 0]
    assert result.marginal == result.conditional == result.simulated_tau == [None] * 3


@given(st.lists(st.lists(st.booleans(), min_size=4, max_size=4), max_size=30), st.integers(1, 4))
def test_cycles_walk_the_text_once(rows: list[list[bool]], K: int) -> None:
    n = len(rows)
    right = np.array(rows, bool).reshape(n, 4)
    right &= np.arange(n)[:, None] + np.arange(4) < n  # nothing is right past the end
    cycles = Guesses([], right).cycles(K)
    assert sum(cycles) == n
    i = 0
    for place, committed in enumerate(cycles):
        is_last = place == len(cycles) - 1
        assert 1 <= committed <= K + 1
        assert right[i, : committed - 1].all(), "only right guesses are accepted"
        assert is_last or committed == K + 1 or not right[i, committed - 1], "and all of those that lead"
        i += committed


def test_accuracy_counts_what_lies_inside_the_text() -> None:
    right = np.array([[1, 1, 0], [0, 1, 1], [1, 1, 0], [1, 0, 0]], bool)
    result = accuracy([Guesses([], right)], 3)
    assert result.num_guesses == [4, 3, 2]
    assert result.marginal == [3 / 4, 3 / 3, 1 / 2]
    assert result.conditional == [3 / 4, 2 / 2, 0 / 1]
    assert result.simulated_tau == [4 / 2, 4 / 2, 4 / 2]

"""Speculative output equals the baseline, token for token, whatever drafts, however shaped, batched or chunked."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.oracle import Known

from aquiline.config import SamplingParams
from aquiline.engine.llm import Result
from aquiline.spec.drafting import Chain, Dynamic, NoDraft, Static

pytestmark = needs_native

NEW_TOKENS = 40
BASELINE = NoDraft()
SPECS = {
    **{f"chain{k}": Chain(k) for k in range(1, 9)},
    "static": Static(),
    "dynamic": Dynamic(depth=3, top_k=3, num_nodes=12),
    "dynamic-60-5-10": Dynamic(depth=5, top_k=10, num_nodes=60),
}
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=NEW_TOKENS),
    "sampled": SamplingParams(max_tokens=NEW_TOKENS, temperature=0.9, seed=11),
    "filtered": SamplingParams(max_tokens=NEW_TOKENS, temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, seed=5),
    "penalised": SamplingParams(
        max_tokens=NEW_TOKENS, temperature=0.7, seed=3, repetition_penalty=1.3, presence_penalty=0.4,
        frequency_penalty=0.2, logit_bias={5: 2.0, 7: -3.0},
    ),
    "greedy-penalised": SamplingParams(max_tokens=NEW_TOKENS, repetition_penalty=1.2, frequency_penalty=0.1),
}  # fmt: skip


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Ragged prompts, one token and page boundaries (16) among them."""
    rng = np.random.default_rng(seed)
    lengths = [1, 15, 16, 17, 33, 70, 2, 48][:count]
    return [rng.integers(1, TINY.vocab_size, n).tolist() for n in lengths]


def tokens(result: Result) -> list[list[int]]:
    return [o.token_ids for o in result.outputs]


def check_accounting(result: Result) -> None:
    """Tau can be recomputed from output lengths, per run and per request, and pages never leak."""
    c = result.summary.counters
    assert sum(len(o.token_ids) for o in result.outputs) == c.num_prefilled + c.num_committed
    assert c.num_committed == c.num_steps + c.num_accepted_tokens - c.tokens_cut
    for output in result.outputs:
        assert len(output.token_ids) == output.metrics.num_prefilled + output.metrics.num_committed
        assert len(output.by_draft) == len(output.token_ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_every_drafter_gives_the_baseline(dtype: str, sampling: SamplingParams) -> None:
    llm = tiny_llm(dtype, max_batch=3)
    batch = prompts(8)  # ragged finishes too: slots are refilled as they empty
    expected = llm.run(batch, sampling, drafting=BASELINE)
    check_accounting(expected)
    assert expected.summary.counters.tau == 1.0
    for name, drafting in SPECS.items():
        result = llm.run(batch, sampling, drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline in {dtype}"
        check_accounting(result)
        assert llm.engine.pool.num_free == llm.engine.pool.num_pages, f"{name} leaked pages"


@pytest.mark.parametrize("max_batch", [1, 3, 8])
@pytest.mark.parametrize("page_size", [16, 64])
def test_batch_chunks_and_pages_change_nothing(max_batch: int, page_size: int) -> None:
    sampling = SAMPLINGS["sampled"]
    alone = [o for p in prompts(8) for o in tiny_llm(max_batch=1).run([p], sampling, drafting=BASELINE).outputs]
    for row_budget in (1, 7, 64):
        llm = tiny_llm(max_batch=max_batch, row_budget=row_budget, page_size=page_size)
        for name in ("chain4", "dynamic"):
            got = tokens(llm.run(prompts(8), sampling, drafting=SPECS[name]))
            assert got == [o.token_ids for o in alone], f"{name}, batch {max_batch}, chunks of {row_budget}"


@pytest.mark.parametrize("sampling", ["greedy", "sampled", "penalised"])
@pytest.mark.parametrize("K", [1, 3, 8])
def test_oracle_commits_all_and_adversary_one(K: int, sampling: str) -> None:
    llm = tiny_llm()
    params = dataclasses.replace(SAMPLINGS[sampling], ignore_eos=True)
    batch = prompts(8)
    expected = llm.run(batch, params, drafting=BASELINE)
    texts = tuple((*p, *o.token_ids) for p, o in zip(batch, expected.outputs, strict=True))
    for is_comb in (False, True):
        result = llm.run(batch, params, drafting=Known(texts, K, TINY.vocab_size, is_comb=is_comb))
        assert tokens(result) == tokens(expected), f"comb {is_comb} K={K}"
        check_accounting(result)
        # K + 1 tokens a step until the length limit cuts the last block
        steps = sum(-(-(len(o.token_ids) - 1) // (K + 1)) for o in result.outputs)
        assert result.summary.counters.num_steps == steps
        assert all(o.by_draft[1 : K + 1] == [True] * K for o in result.outputs)
    result = llm.run(batch, params, drafting=Known(texts, K, TINY.vocab_size, is_wrong=True))
    assert tokens(result) == tokens(expected)
    assert result.summary.counters.tau == 1.0 and result.summary.counters.num_accepted_tokens == 0


def test_one_target_forward_per_step() -> None:
    llm = tiny_llm(max_batch=1)
    for drafting in (BASELINE, SPECS["chain4"], SPECS["dynamic"], SPECS["static"]):
        summary = llm.run(prompts(1), SAMPLINGS["greedy"], drafting=drafting).summary
        assert summary.num_target_forwards == summary.num_decode_steps + 1  # one prefill chunk
        assert summary.counters.num_steps == summary.num_decode_steps


@pytest.mark.parametrize("name", ["chain4", "dynamic"])
def test_seeds_matter_and_repeat(name: str) -> None:
    llm = tiny_llm()
    a, b = (dataclasses.replace(SAMPLINGS["sampled"], seed=s) for s in (1, 2))
    first, again, other = (tokens(llm.run(prompts(4), s, drafting=SPECS[name])) for s in (a, a, b))
    assert first == again and first != other
    unseeded = dataclasses.replace(a, seed=None)
    assert tokens(llm.run(prompts(4), unseeded)) != tokens(llm.run(prompts(4), unseeded))

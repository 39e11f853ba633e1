"""Log-probabilities: the model's own, and the same bits whatever drafted, however the prompt was cut."""

from __future__ import annotations

import dataclasses

import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.logits import log_laws
from tests.engine.oracle import known
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts

from aquiline.config import SamplingParams
from aquiline.engine.llm import Result

pytestmark = needs_native


def logprobs(result: Result) -> list[object]:
    return [(o.logprobs, o.prompt_logprobs) for o in result.outputs]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
def test_the_same_bits_with_every_drafter_and_chunk(sampling: SamplingParams) -> None:
    params = dataclasses.replace(sampling, max_tokens=20, logprobs=3, prompt_logprobs=2)
    expected = logprobs(tiny_llm(max_batch=3).run(prompts(5), params, drafting=BASELINE))
    for row_budget, late in ((48, False), (7, True)):
        llm = tiny_llm(max_batch=2, row_budget=row_budget, late_reads=late, prefix_cache=True)
        for name in ("chain4", "static", "dynamic"):
            assert logprobs(llm.run(prompts(5), params, drafting=SPECS[name])) == expected, f"{name}, late={late}"


@pytest.mark.parametrize("is_comb", [False, True])
def test_the_same_bits_for_accepted_tokens(is_comb: bool) -> None:
    llm = tiny_llm()
    params = SamplingParams(max_tokens=21, temperature=0.8, seed=1, logprobs=0, ignore_eos=True)
    batch = prompts(4)
    expected = llm.run(batch, params, drafting=BASELINE)
    result = llm.run(batch, params, drafting=known(batch, expected, 4, TINY.vocab_size, is_comb=is_comb))
    assert result.summary.counters.tau > 4
    assert logprobs(result) == logprobs(expected)


def test_they_are_the_models_own() -> None:
    llm, prompt = tiny_llm("float32"), prompts(5)[4]
    wild = SamplingParams(
        max_tokens=12, temperature=1.5, top_k=20, seed=2, repetition_penalty=1.5, logprobs=4, prompt_logprobs=0,
        ignore_eos=True,
    )  # fmt: skip
    output = llm.run([prompt], wild).outputs[0]
    assert output.logprobs is not None and output.prompt_logprobs is not None
    assert [e.token_id for e in output.logprobs] == output.token_ids
    assert [e.token_id for e in output.prompt_logprobs] == prompt[1:]
    whole = prompt + output.token_ids
    entries = output.prompt_logprobs + output.logprobs
    for at in (1, 2, 15, 16, 17, 31, 32, len(prompt) - 1, len(prompt), len(prompt) + 5, len(whole) - 1):
        law, entry = log_laws(llm.models, whole[:at])[-1], entries[at - 1]
        assert entry.logprob == pytest.approx(float(law[whole[at]]), abs=1e-4), f"token {at}"
        assert entry.rank == 1 + int((law > law[whole[at]]).sum())
        if at >= len(prompt):
            assert list(entry.top) == law.topk(4).indices.tolist()
        else:
            assert entry.top == {}


def test_stops_cut_them_too() -> None:
    llm = tiny_llm()
    full = llm.run(prompts(1), SamplingParams(max_tokens=20, logprobs=0, ignore_eos=True)).outputs[0]
    stop = full.token_ids[7]
    cut = llm.run(prompts(1), SamplingParams(max_tokens=20, logprobs=0, stop_token_ids=(stop,), ignore_eos=True))
    output = cut.outputs[0]
    assert output.logprobs is not None and full.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids) and output.logprobs == full.logprobs[: len(output.logprobs)]


def test_prompt_logprobs_read_every_row_of_a_cached_prompt() -> None:
    llm = tiny_llm(prefix_cache=True)
    prompt = prompts(6)[5]
    params = SamplingParams(max_tokens=4, prompt_logprobs=1)
    first, again = (llm.run([prompt], params).outputs[0] for _ in range(2))
    assert again.metrics.num_prefix_hits == 0 and again.prompt_logprobs == first.prompt_logprobs
    assert len(again.prompt_logprobs or []) == len(prompt) - 1
    assert llm.run([prompt], SamplingParams(max_tokens=4)).outputs[0].metrics.num_prefix_hits == 64


def test_deltas_carry_them() -> None:
    llm = tiny_llm()
    seen = []
    result = llm.run(
        prompts(1),
        SamplingParams(max_tokens=9, logprobs=1, ignore_eos=True),
        on_delta=lambda d: seen.extend(d.logprobs),
    )
    assert seen == result.outputs[0].logprobs and len(seen) == 9
    assert all(d is None for d in [llm.run(prompts(1), SamplingParams(max_tokens=3)).outputs[0].logprobs])


def test_more_than_the_vocabulary_is_the_vocabulary() -> None:
    output = tiny_llm().run(prompts(1), SamplingParams(max_tokens=2, logprobs=10_000)).outputs[0]
    assert output.logprobs is not None and len(output.logprobs[0].top) == TINY.vocab_size

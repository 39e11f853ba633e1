"""Adaptive drafting in a running engine: the text of plain decoding whatever is chosen, and sensible choices."""

from __future__ import annotations

import dataclasses
import gc

import psutil
import pytest
from tests.conftest import engine_config, needs_native, tiny_llm, tiny_models, tiny_pair, weights_of
from tests.engine.fickle import Fickle, only_planned
from tests.engine.oracle import deepest, teach
from tests.engine.test_exact import SAMPLINGS, check_accounting, prompts, tokens
from tests.engine.test_stateful import walk
from tests.engine.traffic import Setup

from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.costs import CostTable, StepCosts, times_by_rows
from aquiline.engine.llm import LLM
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Dynamic, NoDraft
from aquiline.spec.lookup import Lookup

pytestmark = needs_native

CHEAP_ROWS = times_by_rows([(1, 2.0), (32, 2.2)])
DEAR_ROWS = times_by_rows([(1, 1.0), (32, 32.0)])


def controlled(llm: LLM, verify: tuple[float, ...], draft_ms: float) -> Controller:
    """A controller that believes in these costs, and goes on believing."""
    passes = times_by_rows([(1, draft_ms), (32, 2 * draft_ms)])
    costs = StepCosts(CostTable(verify, passes, passes))
    costs.learn_verify = costs.learn_draft = costs.learn_host = lambda *args: None  # type: ignore[method-assign]
    llm.engine.controller = found = Controller(costs, llm.engine.meter.choices)
    only_planned(found)
    return found


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS.keys())
@pytest.mark.parametrize("seed", range(3))
def test_random_choices_give_the_same_text(sampling: SamplingParams, seed: int) -> None:
    llm = tiny_llm(max_batch=3)
    expected = tokens(llm.run(prompts(8), sampling, drafting=NoDraft()))
    llm.engine.controller = fickle = Fickle(seed)
    result = llm.run(prompts(8), sampling, drafting=Adaptive(5))
    assert tokens(result) == expected
    check_accounting(result)
    assert all(fickle.taken[way] for way in ("none", "probe", "cut", "chain", "random", "copy", "both")), fickle.taken
    assert not fickle._states, "nothing is kept of requests that have ended"


def test_it_gives_the_same_text_by_its_own_choices_beside_fixed_ones() -> None:
    llm = tiny_llm(max_batch=4)
    sampling = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)
    specs = (Adaptive(), Chain(2), Adaptive(3, lookup=False), Lookup(), Dynamic(), NoDraft())
    expected = [o.token_ids for o in llm.run(prompts(6), sampling, drafting=NoDraft()).outputs]
    requests = [
        llm.request(i, p, sampling, drafting) for i, (p, drafting) in enumerate(zip(prompts(6), specs, strict=True))
    ]
    outputs = sorted(llm.outputs(requests), key=lambda o: o.request_id)
    assert [o.token_ids for o in outputs] == expected


def test_what_was_chosen_is_in_the_figures_of_the_run() -> None:
    llm = tiny_llm(max_batch=2)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, seed=0)
    assert llm.run(prompts(3), sampling, drafting=NoDraft()).summary.as_dict()["adaptive"] is None
    controlled(llm, CHEAP_ROWS, draft_ms=0.01)
    for _ in range(2):
        summary = llm.run(prompts(3), sampling, drafting=Adaptive()).summary
        choices, counters = summary.choices, summary.counters
        assert sum(choices.steps.values()) == counters.num_steps
        assert sum(choices.nodes.values()) == counters.num_draft_tokens
        assert sum(choices.accepted.values()) == counters.num_accepted_tokens + counters.tokens_cut
        assert choices.num_chosen == summary.num_decode_steps and choices.choosing_ms > 0
        assert 0 < choices.num_timed <= choices.num_chosen and sum(choices.verified) > 0
        found = summary.as_dict()["adaptive"]
        assert isinstance(found, dict) and found["steps"] == choices.steps


def test_the_torch_path_adapts_too() -> None:
    native = tiny_llm("float32")
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=2)
    decoder, head = tiny_pair()
    pair = TorchPair(*weights_of(decoder, head), "float32")
    llm = LLM.from_models(dataclasses.replace(tiny_models("float32"), pair=pair), engine_config(3))
    llm.engine.controller = Fickle(1)
    assert tokens(llm.run(prompts(4), sampling, drafting=Adaptive(4))) == tokens(
        native.run(prompts(4), sampling, drafting=NoDraft())
    )


def test_dear_drafts_are_left_and_probed_within_the_budget() -> None:
    llm = tiny_llm(max_batch=2)
    controller = controlled(llm, DEAR_ROWS, draft_ms=5.0)
    llm.run(prompts(2) * 4, SamplingParams(max_tokens=300, ignore_eos=True, seed=0), drafting=Adaptive(lookup=False))
    steps = controller.ledger.steps
    assert steps["draft"] == 0 and 0 < steps["probe"] <= 4 + 0.004 * 2.1 / 5.0 * sum(steps.values()) + 1


def test_cheap_drafts_that_are_right_are_long() -> None:
    """The text repeats itself, and the draft is taught to be right: everything is drafted, to the longest chain."""
    llm = tiny_llm(max_batch=1)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True, seed=0)
    expected = llm.run(prompts(1), sampling, drafting=NoDraft())
    teach(llm, [(*o.prompt_ids, *o.token_ids) for o in expected.outputs], deepest)
    controller = controlled(llm, CHEAP_ROWS, draft_ms=0.01)
    result = llm.run(prompts(1), sampling, drafting=Adaptive(6, lookup=False))
    assert tokens(result) == tokens(expected)
    assert controller.ledger.steps["draft"] >= 0.9 * result.summary.counters.num_steps


def test_pages_fill_the_cache_while_nothing_is_drafted() -> None:
    """A sequence that does not draft writes no draft keys, and its pages serve others as those of plain decoding do.
    Once it drafts, the cache knows that the same pages have their draft keys."""
    llm = tiny_llm(max_batch=1, prefix_cache=True)
    ledger = controlled(llm, DEAR_ROWS, draft_ms=50.0).ledger
    prompt = prompts(6)[5]
    request = llm.request(0, prompt, SamplingParams(max_tokens=140, ignore_eos=True, seed=0), Adaptive(lookup=False))
    sequence, size = llm.engine.add(request), llm.engine.pool.page_size
    while len(sequence.output_ids) < 100:
        llm.engine.step()
        assert len(sequence.nodes) >= sequence.num_cached // size - 1, "published nearly as they fill"
    assert ledger.steps["draft"] == 0 and sequence.draft_end < len(prompt) + size, "all but the first probes"
    assert [node.has_draft for node in sequence.nodes[-4:]] == [False] * 4
    controlled(llm, CHEAP_ROWS, draft_ms=0.01)
    while sequence.draft_end < len(prompt) + 100:
        llm.engine.step()
    assert all(node.has_draft for node in sequence.nodes)
    llm.engine.reset()


def test_limits_of_the_value_are_kept() -> None:
    llm = tiny_llm(max_batch=2)
    llm.engine.controller = Fickle(3)
    engine, most = llm.engine, 0
    for i, prompt in enumerate(prompts(3)):
        engine.add(
            llm.request(i, prompt, SamplingParams(max_tokens=60, ignore_eos=True, seed=i), Adaptive(2, lookup=False))
        )
    while engine.is_busy:
        engine.step()
        if engine.pipeline.last is not None:
            most = max([most, *(d.num_drafted for d in engine.pipeline.last.output.decodes)])
    assert 0 < most <= 4


@pytest.mark.parametrize("bad", [0, 17, True, 2.5])
def test_a_bad_length_is_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="max_spec_tokens"):
        Adaptive(bad)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_hundred_thousand_steps_of_every_switch(run_seed: int) -> None:
    """Random switching between all ways to draft under preemption, prefix hits and aborts; every text is that of plain
    decoding, every page comes back, and memory stays flat."""
    process, sizes = psutil.Process(), []
    for number in range(50):
        walk(Setup(num_pages=16, row_budget=24), [run_seed, number], num_steps=2000)
        gc.collect()
        sizes.append(process.memory_info().rss)
    assert sizes[-1] < 1.05 * sizes[9], "resident bytes at the end and after a fifth"

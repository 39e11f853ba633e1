"""Without the native library torch runs, openly: the same interface, and results that say what they do not promise."""

from __future__ import annotations

import logging

import pytest
from tests.conftest import engine_config, from_modules, needs_native, tiny_llm, tiny_pair
from tests.engine.test_exact import BASELINE, SPECS, check_accounting, prompts, tokens

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.engine.pipeline import Step

SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, seed=0, ignore_eos=True)


@pytest.fixture(scope="module")
def torch_llm() -> LLM:
    config = engine_config(4)
    decoder, head = tiny_pair()
    return LLM.from_models(from_modules(decoder, head, None, Loading("float32"), Environment("off", 1)), config)


def test_results_say_what_ran(torch_llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    system = torch_llm.models.system()
    assert (system["path"], system["isa"], system["exact_trees"]) == ("torch", "torch", False)
    with caplog.at_level(logging.WARNING, logger="aquiline"):
        from_modules(*tiny_pair(), None, Loading("float32"), Environment("off", 1))
    assert "AQUILINE_ISA=off" in caplog.text and "not bit-exact" in caplog.text


@pytest.mark.parametrize("name", ["chain4", "static", "dynamic"])
def test_every_drafter_runs_and_counts(torch_llm: LLM, name: str) -> None:
    result = torch_llm.run(prompts(5), GREEDY, drafting=SPECS[name])
    assert [len(o.token_ids) for o in result.outputs] == [12] * 5
    assert result.summary.counters.num_draft_tokens > 0
    check_accounting(result)
    assert tokens(result) == tokens(torch_llm.run(prompts(5), GREEDY, drafting=BASELINE)), "no near tie in this fixture"


@needs_native
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_equals_the_native_paths(torch_llm: LLM, sampling: SamplingParams) -> None:
    native = tiny_llm("float32", max_batch=4)
    assert native.models.system()["exact_trees"] is True
    for drafting in (BASELINE, SPECS["chain4"]):
        assert tokens(torch_llm.run(prompts(5), sampling, drafting=drafting)) == tokens(
            native.run(prompts(5), sampling, drafting=drafting)
        )


@needs_native
@pytest.mark.parametrize("name", ["chain4", "static", "dynamic"])
def test_drafts_equal_the_native_paths(torch_llm: LLM, name: str) -> None:
    """Tree by tree, over whole texts."""
    proposals = []
    for llm in (torch_llm, tiny_llm("float32", max_batch=4)):
        trees: dict[int, list[tuple[list[int], list[int]]]] = {i: [] for i in range(3)}
        for i, prompt in enumerate(prompts(3)):
            llm.engine.add(llm.request(i, prompt, GREEDY, SPECS[name]))
        steps: list[Step] = []
        while llm.engine.is_busy:
            llm.engine.step()
            last = llm.engine.pipeline.last
            assert last is not None
            if last.plan.decoding and (not steps or last is not steps[-1]):
                steps.append(last)
                tree, _ = last.output.trees
                for b, sequence in enumerate(last.plan.decoding):
                    rows = slice(*tree.topology.offsets[b : b + 2])
                    grown = tree.tokens[rows].tolist(), tree.topology.parents[rows].tolist()
                    trees[int(sequence.request.id)].append(grown)
        proposals.append(trees)
    for i in range(3):
        ours, theirs = (found[i] for found in proposals)
        count = min(len(ours), len(theirs))  # a step may have been out when its sequence was found to have ended
        assert ours[:count] == theirs[:count] and count > 5 and abs(len(ours) - len(theirs)) <= 1

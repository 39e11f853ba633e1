"""Without the native library torch runs, openly: the same interface, and results that say what they do not promise."""

from __future__ import annotations

import logging

import pytest
import torch
from aquiline.spec.drafters import drafter
from tests.conftest import TINY, engine_config, needs_native, tiny_llm, tiny_pair
from tests.engine.test_exact import BASELINE, SPECS, check_accounting, prompts, tokens

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, from_modules

SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.9, seed=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


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
    result = torch_llm.run(prompts(5), GREEDY, spec=SPECS[name])
    assert [len(o.token_ids) for o in result.outputs] == [12] * 5
    assert result.summary.counters.num_draft_tokens > 0
    check_accounting(result)
    assert tokens(result) == tokens(torch_llm.run(prompts(5), GREEDY, spec=BASELINE)), "no near tie in this fixture"


@needs_native
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_text_equals_the_native_paths(torch_llm: LLM, sampling: SamplingParams) -> None:
    native = tiny_llm("float32", max_batch=4)
    assert native.models.system()["exact_trees"] is True
    for spec in (BASELINE, SPECS["chain4"]):
        assert tokens(torch_llm.run(prompts(5), sampling, spec=spec)) == tokens(
            native.run(prompts(5), sampling, spec=spec)
        )


@needs_native
def test_drafts_equal_the_native_paths(torch_llm: LLM) -> None:
    native = tiny_llm("float32", max_batch=4)
    proposals = []
    for llm in (torch_llm, native):
        seen: list[list[int]] = []
        drafting = drafter(SPECS["dynamic"])
        assert drafting is not None
        propose = drafting.propose

        def note(*args: object, propose: object = propose, seen: list[list[int]] = seen) -> object:
            tree = propose(*args)  # type: ignore[operator]
            seen.append(tree.tokens.tolist())
            return tree

        drafting.propose = note  # type: ignore[method-assign]
        llm.engine.drafters[SPECS["dynamic"]] = drafting
        llm.run(prompts(2), GREEDY, spec=SPECS["dynamic"])
        del llm.engine.drafters[SPECS["dynamic"]]
        proposals.append(seen)
    assert proposals[0] == proposals[1] and torch.tensor(proposals[0][0]).max() < TINY.vocab_size

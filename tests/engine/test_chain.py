"""A chain that is drafted in one native call is the chain of its single passes, and leaves the same keys behind."""

from __future__ import annotations

import dataclasses
from functools import partial

import numpy as np
import pytest
from tests.conftest import needs_native, tiny_llm
from tests.engine.driving import PARAMS, words

from aquiline.config import SpecConfig
from aquiline.engine.llm import LLM
from aquiline.models.runner import NativeDraft, TorchDraft
from aquiline.ops import cpu

pytestmark = needs_native


def runner_of(llm: LLM) -> NativeDraft:
    assert llm.engine.stepper.session is not None
    runner = llm.engine.stepper.session.runner
    assert isinstance(runner, NativeDraft)
    return runner


@pytest.mark.parametrize("norm_feedback", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 5, 8])
def test_one_call_drafts_what_single_passes_do(
    depth: int, norm_feedback: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchDraft.chain is the loop over passes, whichever runner's they are. Batches are ragged."""
    steps: list[list[tuple[list[int], bytes]]] = []
    for one_call in (True, False):
        llm = tiny_llm("float32", max_batch=3)
        runner, engine = runner_of(llm), llm.engine
        monkeypatch.setattr(runner, "config", dataclasses.replace(runner.config, norm_feedback=norm_feedback))
        monkeypatch.setattr(runner, "hidden", runner.raw)
        if not one_call:
            monkeypatch.setattr(runner, "chain", partial(TorchDraft.chain, runner))  # type: ignore[arg-type]
        spec = SpecConfig(num_spec_tokens=depth)
        for i, length in enumerate((5, 16, 33)):
            engine.add(llm.request(i, words(length, i), dataclasses.replace(PARAMS, max_tokens=4 * i + 6), spec))
        assert engine.stepper.session is not None
        kv, seen = engine.stepper.session.kv, []
        kv.k.zero_(), kv.v.zero_()
        while engine.is_busy:
            engine.step()
            assert engine.last is not None
            seen.append((engine.last.tree.tokens.tolist(), kv.k.numpy().tobytes() + kv.v.numpy().tobytes()))
        steps.append(seen)
    assert len(steps[0]) == len(steps[1]) > 5
    for number, (ours, passes) in enumerate(zip(*steps, strict=True)):
        assert ours[0] == passes[0], f"tokens of step {number}"
        assert ours[1] == passes[1], f"keys and values after step {number}"


def test_a_draft_whose_numbers_are_broken_drafts_tokens_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm("float32")
    expected = llm.run([words(9)], PARAMS, spec=SpecConfig(drafter="none")).outputs[0].token_ids
    runner = runner_of(llm)
    forward = runner.model.forward

    def broken(*args: object) -> None:
        forward(*args)  # type: ignore[arg-type]
        runner.raw[:] = np.nan

    monkeypatch.setattr(runner.model, "forward", broken)
    output = llm.run([words(9)], PARAMS, spec=SpecConfig(num_spec_tokens=3)).outputs[0]
    assert output.token_ids == expected


@pytest.mark.parametrize(
    ("fields", "named"), [({"depth": 0}, "depth=0: must be at least 1"), ({"source": -1}, r"row_index\[0\]=-1")]
)
def test_what_the_library_refuses(fields: dict[str, int], named: str) -> None:
    llm = tiny_llm("float32")
    llm.run([words(9)], PARAMS)
    runner, session = runner_of(llm), llm.engine.stepper.session
    assert session is not None
    session.rows.num = 1
    source = np.array([fields.get("source", 0)], np.int32)
    with pytest.raises(cpu.native.NativeError, match=named):
        runner.chain(session.rows, session.kv, source, fields.get("depth", 2))

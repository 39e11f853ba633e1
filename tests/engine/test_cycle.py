"""A cycle that is one native call does what the single calls do, to the bit, and leaves the same behind."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from tests.conftest import TINY, TINY_DRAFT, engine_config, needs_native, tiny_llm, tiny_models, tiny_pair
from tests.engine.driving import PARAMS, add, finish, words
from tests.engine.test_exact import BASELINE, SPECS

from aquiline.config import Environment, SamplingParams, SpecConfig
from aquiline.engine.engine import Engine
from aquiline.engine.llm import LLM
from aquiline.engine.model import from_modules
from aquiline.errors import NativeError
from aquiline.ops.cycle import Cycled, NativeCycle
from aquiline.spec.simulate import SimulatedAcceptance

pytestmark = needs_native

DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {}, "feedback": {"norm_feedback": True}, "part norms": {"fc_norm": True, "norm_feedback": True},
    "one norm": {"norm_before_fc": True},
}  # fmt: skip


def new_llm(draft: str, max_batch: int = 3) -> LLM:
    decoder, head = tiny_pair(draft=dataclasses.replace(TINY_DRAFT, **DRAFTS[draft]))
    config = engine_config(max_batch)
    return LLM.from_models(
        from_modules(decoder, head, None, "float32", config, Environment.read()), config, SpecConfig()
    )


def state(engine: Engine) -> dict[str, object]:
    """All that a later step can read."""
    stepper, slots = engine.stepper, engine.stepper.slots
    assert stepper.session is not None
    carried = [
        (slots.carried[s, :n].tolist(), slots.carried_tokens[s, :n].tolist())
        for s, n in enumerate(slots.num_carried.tolist())
    ]
    tensors = (stepper.kv.k, stepper.kv.v, stepper.session.kv.k, stepper.session.kv.v)
    return {
        "roots": (slots.tokens.tolist(), slots.positions.tolist()), "carried": carried,
        "page features": slots.page_features.tobytes(), "kv": [t.numpy().tobytes() for t in tensors],
        "draft rows": engine.meter.slots.num_draft_rows,
    }  # fmt: skip


def outcome_of(engine: Engine) -> dict[str, object]:
    last = engine.last
    assert last is not None
    logprobs = [[(t.token_id, t.logprob, t.rank) for t in each] for each in last.logprobs.values()]
    return {
        "lists": (last.slots, last.positions, last.kept, last.num_drafted, last.num_decode_rows),
        "tree": (last.tree.tokens.tolist(), last.tree.topology.offsets.tolist()),
        "result": [a.tolist() for a in (last.result.path, last.result.tokens, last.result.num_accepted)],
        "by slot": {k: v.tolist() for k, v in last.by_slot(engine.config.max_batch).items()}, "logprobs": logprobs,
    }  # fmt: skip


def clean(llm: LLM) -> None:
    """What was never written must compare equal, too."""
    stepper = llm.engine.stepper
    assert stepper.session is not None
    for tensor in (stepper.kv.k, stepper.kv.v, stepper.session.kv.k, stepper.session.kv.v):
        tensor.zero_()
    stepper.slots.page_features[:] = 0


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("depth", [0, 1, 2, 5, 16])
def test_one_call_is_the_single_calls(depth: int, draft: str) -> None:
    """Step by step; batches are ragged, sequences end one after the other, logits are sampled, filtered and greedy."""
    spec = SpecConfig(num_spec_tokens=depth) if depth else BASELINE
    ways = {0: {"temperature": 0.0}, 1: {"logprobs": 2}, 2: {"top_k": 20, "top_p": 0.9}}
    seen: list[list[tuple[dict[str, object], dict[str, object]]]] = []
    for one_call in (True, False):
        llm = new_llm(draft)
        assert llm.engine.stepper.cycle is not None
        if not one_call:
            llm.engine.stepper.cycle = None
        clean(llm)
        for i, length in enumerate((5, 16, 33)):
            add(llm, i, words(length, i), dataclasses.replace(PARAMS, max_tokens=9 * i + 6, **ways[i]), spec)
        steps = []
        while llm.engine.is_busy:
            llm.engine.step()
            steps.append((outcome_of(llm.engine), state(llm.engine)))
        seen.append(steps)
    assert len(seen[0]) == len(seen[1]) > 5
    for number, (ours, single) in enumerate(zip(*seen, strict=True)):
        for mine, theirs in zip(ours, single, strict=True):
            for name in theirs:
                assert mine[name] == theirs[name], f"step {number}: {name}"


def test_a_target_without_a_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, _ = tiny_pair()
    config = engine_config(2)
    models = from_modules(decoder, None, None, "float32", config, Environment.read())
    llm = LLM.from_models(models, config, BASELINE)
    batch = [words(9), words(20, 1)]
    lengths = counted(llm, monkeypatch)
    outputs = [o.token_ids for o in llm.run(batch, PARAMS).outputs]
    assert lengths and set(lengths) == {0}
    llm.engine.stepper.cycle = None
    assert [o.token_ids for o in llm.run(batch, PARAMS).outputs] == outputs
    with pytest.raises(NativeError, match="depth=1: must be at least 0, and 0 without a draft"):
        LLM.from_models(models, config, BASELINE).engine.stepper.cycle([0], 1)  # type: ignore[misc]


def counted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Chain lengths of the cycles that run in one call."""
    lengths: list[int] = []
    call = NativeCycle.__call__

    def count(
        self: NativeCycle, slots: list[int], num_spec_tokens: int, forced: list[int] | None = None
    ) -> list[Cycled]:
        lengths.append(num_spec_tokens)
        return call(self, slots, num_spec_tokens, forced)

    monkeypatch.setattr(NativeCycle, "__call__", count)
    return lengths


@pytest.mark.parametrize("name", ["none", "chain4", "static", "dynamic"])
def test_who_runs_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    lengths = counted(llm, monkeypatch)
    output = llm.run([words(9), words(20, 1)], PARAMS, spec=BASELINE if name == "none" else SPECS[name])
    num_steps = output.summary.num_decode_steps
    expected = {"none": [0] * num_steps, "chain4": [4] * num_steps}.get(name, [])
    assert lengths == expected


def test_who_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of two lengths, chunks beside them, and changed logits."""
    llm = tiny_llm()
    lengths = counted(llm, monkeypatch)
    add(llm, "a", words(5), PARAMS, SpecConfig(num_spec_tokens=2))
    add(llm, "b", words(5), dataclasses.replace(PARAMS, max_tokens=40), SpecConfig(num_spec_tokens=3))
    while len(llm.engine.sequences) == 2:
        llm.engine.step()
        assert not lengths
    llm.engine.step()
    assert lengths == [3], "alone again"
    add(llm, "c", words(5), dataclasses.replace(PARAMS, presence_penalty=0.5, max_tokens=100), BASELINE)
    finish(llm)
    assert lengths == [3]


@pytest.mark.parametrize("tau", [1.0, 1.7, 3.0])
def test_a_simulated_acceptance_runs_the_same_cycles(tau: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step by step as the single calls would, which the figures of random weights used to time instead."""
    seen: list[list[tuple[dict[str, object], dict[str, object]]]] = []
    for one_call in (True, False):
        models = dataclasses.replace(tiny_models("float32"), simulated=SimulatedAcceptance(tau))
        llm = LLM.from_models(models, engine_config(2), SpecConfig(num_spec_tokens=3))
        clean(llm)
        lengths = counted(llm, monkeypatch)
        if not one_call:
            llm.engine.stepper.cycle = None
        for i, length in enumerate((5, 16)):
            add(llm, i, words(length, i), dataclasses.replace(PARAMS, max_tokens=12), SpecConfig(num_spec_tokens=3))
        steps = []
        while llm.engine.is_busy:
            llm.engine.step()
            steps.append((outcome_of(llm.engine), state(llm.engine)))
        assert bool(lengths) == one_call
        seen.append(steps)
    assert seen[0] == seen[1]


def test_more_drafts_than_a_chain_has_cannot_be_accepted() -> None:
    llm = tiny_llm("float32")
    sequence = add(llm, 0, words(9), PARAMS, SpecConfig(num_spec_tokens=2))
    while len(sequence.output_ids) < 3:
        llm.engine.step()
    cycle, before = llm.engine.stepper.cycle, state(llm.engine)
    assert cycle is not None
    for forced in (3, -1):
        with pytest.raises(NativeError, match=rf"forced\[0\]={forced}: must be in \[0, 2\]"):
            cycle([0], 2, [forced])
    assert state(llm.engine) == before


def test_a_draft_whose_numbers_are_broken_drafts_tokens_that_exist() -> None:
    llm = tiny_llm("float32")
    expected = llm.run([words(9)], PARAMS, spec=BASELINE).outputs[0].token_ids
    sequence = add(llm, 0, words(9), PARAMS, SpecConfig(num_spec_tokens=3))
    while llm.engine.is_busy:
        llm.engine.stepper.slots.carried[:] = np.nan
        llm.engine.step()
        last = llm.engine.last
        assert last is not None
        assert ((last.tree.tokens >= 0) & (last.tree.tokens < TINY.vocab_size)).all()
    assert sequence.output_ids == expected


def test_what_the_library_refuses_changes_nothing() -> None:
    llm = tiny_llm("float32", max_batch=2)
    sequence = add(llm, 0, words(9), SamplingParams(max_tokens=50, seed=1, ignore_eos=True), SpecConfig())
    while len(sequence.output_ids) < 5:
        llm.engine.step()
    stepper = llm.engine.stepper
    cycle, slots = stepper.cycle, stepper.slots
    assert cycle is not None
    depth = slots.carried.shape[1]
    before = state(llm.engine)
    broken: list[tuple[list[int], int, str]] = [
        ([2], 1, r"slots\[0\]=2: must be in \[0, 2\)"), ([-1], 1, r"slots\[0\]=-1"), ([], 1, "n=0"),
        ([0], -1, "depth=-1"), ([0], depth, f"depth={depth}: must be below max_carry"),
        ([1], 1, r"num_carried\[1\]=0"),
    ]  # fmt: skip
    for who, length, named in broken:
        with pytest.raises(NativeError, match=named):
            cycle(who, length)
    assert state(llm.engine) == before

    place = int(slots.positions[0])
    slots.positions[0] = -1
    with pytest.raises(NativeError, match=r"positions\[0\]=-1"):
        cycle([0], 0)
    slots.positions[0] = 10**6
    with pytest.raises(NativeError, match="write"):
        cycle([0], 0)
    slots.positions[0] = place
    assert state(llm.engine)["roots"] == before["roots"]
    finish(llm)
    assert sequence.output_ids == llm.run([words(9)], sequence.request.sampling, spec=BASELINE).outputs[0].token_ids

"""What speculation leaves behind: draft rows, features and pages equal those of the committed text read afresh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from aquiline.spec.drafters import Roots
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.oracle import Oracle, TreeOracle
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, run_with, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import Drafting, Dynamic, Static
from aquiline.types import Int32, KVGroup

pytestmark = needs_native

PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=9, ignore_eos=True)
COMB = Static(tuple((*(1,) * d, r) for d in range(4) for r in (0, 1)))


class Fickle:
    """Right up to a level that changes from step to step, wrong below: every length of path is accepted and dropped."""

    def next_tokens(self, roots: Roots) -> np.ndarray:
        drafts = super().next_tokens(roots)  # type: ignore[misc]
        wrong_from = (roots.positions * 7 // 3) % (drafts.shape[1] + 1)
        levels = np.arange(drafts.shape[1])
        return np.where(levels >= wrong_from[:, None], (drafts + 1) % TINY.vocab_size, drafts).astype(np.int32)


class FickleChain(Fickle, Oracle):
    pass


class FickleTree(Fickle, TreeOracle):
    pass


def stored(kv: KVGroup, table: Int32, slot: int, first: int, end: int) -> list[np.ndarray]:
    """Keys and values of KV indices [first, end) of one slot."""
    index = np.arange(first, end)
    pages, place = table[slot, index // kv.page_size], index % kv.page_size
    keys = kv.k[:, pages, :, place // 16, :, place % 16]
    return [t.float().numpy() for t in (keys, kv.v[:, pages, :, place])]


def fresh(llm: LLM, spec: Drafting, prompt: list[int]) -> Sequence:
    """Prefill a prompt and stop before its first decode step."""
    sequence = llm.engine.add(llm.request(0, prompt, PARAMS, spec))
    while len(sequence.tokens) == len(prompt):
        llm.engine.step()
    return sequence


@pytest.mark.parametrize("kind", [FickleChain, FickleTree])
def test_state_after_many_steps_equals_a_fresh_prefill(kind: type[Oracle]) -> None:
    spec = COMB if kind is FickleTree else SPECS["chain4"]
    llm, other = tiny_llm("float32"), tiny_llm("float32")
    prompt = np.random.default_rng(1).integers(1, TINY.vocab_size, 21).tolist()
    truth = [*prompt, *llm.run([prompt], PARAMS, spec=BASELINE).outputs[0].token_ids]
    llm.engine.drafters[spec] = kind(4, {0: truth}, TINY.vocab_size)
    ours = fresh(llm, spec, prompt)
    accepted = []
    while llm.engine.is_busy:
        accepted += [delta.num_accepted for delta in llm.engine.step()]
        if ours.finish_reason is not None:
            break
        theirs = fresh(other, spec, ours.tokens[:-1])
        assert theirs.tokens == ours.tokens == truth[: len(ours.tokens)]
        n = ours.num_cached
        best = []
        for engine, sequence in ((llm.engine, ours), (other.engine, theirs)):
            session, slots = engine.stepper.session, engine.stepper.slots
            assert session is not None
            roots = slots.roots(np.array([sequence.slot], np.int32))
            session.extend(slots.pending(roots), roots)
            best.append(session.children(5))
        assert best[0].ids.tolist() == best[1].ids.tolist(), f"proposals after {n} tokens"
        assert best[0].logprobs.tobytes() == best[1].logprobs.tobytes()
        for name, first, end in (("target", 0, n), ("draft", 1, n + 1)):  # draft row j stands at j + 1
            steppers = (llm.engine.stepper, other.engine.stepper)
            kvs = [s.kv if name == "target" else s.session.kv for s in steppers]  # type: ignore[union-attr]
            slots = (ours.slot, theirs.slot)
            pools = (llm.engine.pool, other.engine.pool)
            a, b = (stored(kv, p.table, s, first, end) for kv, p, s in zip(kvs, pools, slots, strict=True))
            assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"{name} KV after {n} tokens"
        other.engine.reset()
    assert set(accepted) >= {0, 1, 2, 3, 4}, "the drafter should be right to every depth"


@pytest.mark.parametrize("kind", [FickleChain, FickleTree])
def test_rollback_at_every_offset_of_a_page(kind: type[Oracle]) -> None:
    spec = COMB if kind is FickleTree else SPECS["chain4"]
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=12, ignore_eos=True)
    rng = np.random.default_rng(2)
    llm = tiny_llm()
    for first in range(1, 34, 8):  # roots at every offset of two pages of 16
        batch = [rng.integers(1, TINY.vocab_size, n).tolist() for n in range(first, first + 8)]
        expected = llm.run(batch, params, spec=BASELINE)
        result = run_with(llm, lambda truth: kind(4, truth, TINY.vocab_size), batch, expected, params, spec)
        assert tokens(result) == tokens(expected), f"prompts of {first} to {first + 7} tokens"
        assert 0 < result.summary.counters.acceptance_rate < 1


@pytest.mark.parametrize("name", ["chain8", "dynamic-60-5-10"])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_trees_at_the_last_position(name: str, max_tokens: int) -> None:
    llm = tiny_llm(max_batch=2)
    batch = [np.random.default_rng(3).integers(1, 96, TINY.max_positions - max_tokens - d).tolist() for d in (0, 1)]
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=max_tokens, ignore_eos=True)
    expected = llm.run(batch, params, spec=BASELINE)
    assert tokens(llm.run(batch, params, spec=SPECS[name])) == tokens(expected)
    assert [o.finish_reason for o in expected.outputs] == ["length"] * 2
    with pytest.raises(ValueError, match="exceeds the 400 positions"):
        llm.run([[1] * (TINY.max_positions - max_tokens + 1)], params)


def test_the_deepest_tree_the_buffers_hold() -> None:
    llm = tiny_llm(max_batch=1)
    deep = Dynamic(depth=31, top_k=2, num_nodes=100)
    params = dataclasses.replace(SAMPLINGS["greedy"], max_tokens=8, ignore_eos=True)
    batch = [[5, 6, 7]]
    assert tokens(llm.run(batch, params, spec=deep)) == tokens(llm.run(batch, params, spec=BASELINE))

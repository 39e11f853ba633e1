"""What speculation leaves behind: draft rows, features and pages equal those of the committed text read afresh."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tests.conftest import TINY, needs_native, tiny_llm
from tests.engine.oracle import teach
from tests.engine.storage import draft_stored, target_stored
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, tokens

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.sequence import Sequence
from aquiline.spec.drafting import Drafting, Dynamic, Static

pytestmark = needs_native

PARAMS = SamplingParams(max_tokens=60, temperature=0.8, seed=9, ignore_eos=True)
COMB = Static(tuple((*(1,) * d, r) for d in range(4) for r in (0, 1)))


def fresh(llm: LLM, drafting: Drafting, prompt: list[int]) -> Sequence:
    """Prefill a prompt and stop before its first decode step."""
    sequence = llm.engine.add(llm.request(0, prompt, PARAMS, drafting))
    while len(sequence.tokens) == len(prompt):
        llm.engine.step()
    return sequence


@pytest.mark.parametrize("drafting", [SPECS["chain4"], COMB], ids=["chain", "tree"])
def test_state_after_many_steps_equals_a_fresh_prefill(drafting: Drafting) -> None:
    llm, other = tiny_llm("float32"), tiny_llm("float32")
    prompt = np.random.default_rng(1).integers(1, TINY.vocab_size, 21).tolist()
    truth = [*prompt, *llm.run([prompt], PARAMS, drafting=BASELINE).outputs[0].token_ids]
    taught = teach(llm, [truth])
    ours = fresh(llm, drafting, prompt)
    accepted, expected_tree = [], None
    while llm.engine.is_busy:
        accepted += [delta.num_accepted for delta in llm.engine.step()]
        if expected_tree is not None:
            assert taught.grown.tokens.tolist() == expected_tree, f"what is drafted behind {len(ours.tokens)} tokens"
        if ours.finish_reason is not None:
            break
        theirs = fresh(other, drafting, ours.tokens[:-1])
        assert theirs.tokens == ours.tokens == truth[: len(ours.tokens)]
        pages = [one.engine.pool.owned[s.slot] for one, s in ((llm, ours), (other, theirs))]
        a, b = (target_stored(one.engine, p, ours.num_cached) for one, p in zip((llm, other), pages, strict=True))
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"target KV of {ours.num_cached} tokens"
        a, b = (draft_stored(one.engine, p, 1, ours.draft_end) for one, p in zip((llm, other), pages, strict=True))
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True)), f"draft KV of {ours.draft_end} tokens"
        other.engine.step()
        assert other.engine.pipeline.last is not None
        expected_tree = other.engine.pipeline.last.output.trees.drafted.tokens.tolist()
        other.engine.reset()
    assert set(accepted) >= {0, 1, 2, 3, 4}, "the drafts should be right to every depth"


@pytest.mark.parametrize("drafting", [SPECS["chain4"], COMB], ids=["chain", "tree"])
def test_rollback_at_every_offset_of_a_page(drafting: Drafting) -> None:
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=12, ignore_eos=True)
    rng = np.random.default_rng(2)
    for first in range(1, 34, 8):  # roots at every offset of two pages of 16
        llm = tiny_llm()
        batch = [rng.integers(1, TINY.vocab_size, n).tolist() for n in range(first, first + 8)]
        expected = llm.run(batch, params, drafting=BASELINE)
        teach(llm, [[*p, *o.token_ids] for p, o in zip(batch, expected.outputs, strict=True)])
        result = llm.run(batch, params, drafting=drafting)
        assert tokens(result) == tokens(expected), f"prompts of {first} to {first + 7} tokens"
        assert 0 < result.summary.counters.acceptance_rate < 1


@pytest.mark.parametrize("name", ["chain8", "dynamic-60-5-10"])
@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_trees_at_the_last_position(name: str, max_tokens: int) -> None:
    llm = tiny_llm(max_batch=2)
    batch = [np.random.default_rng(3).integers(1, 96, TINY.max_positions - max_tokens - d).tolist() for d in (0, 1)]
    params = dataclasses.replace(SAMPLINGS["sampled"], max_tokens=max_tokens, ignore_eos=True)
    expected = llm.run(batch, params, drafting=BASELINE)
    assert tokens(llm.run(batch, params, drafting=SPECS[name])) == tokens(expected)
    assert [o.finish_reason for o in expected.outputs] == ["length"] * 2
    with pytest.raises(ValueError, match="exceeds the 400 positions"):
        llm.run([[1] * (TINY.max_positions - max_tokens + 1)], params)


def test_the_deepest_tree_the_buffers_hold() -> None:
    llm = tiny_llm(max_batch=1)
    deep = Dynamic(depth=31, top_k=2, num_nodes=100)
    params = dataclasses.replace(SAMPLINGS["greedy"], max_tokens=8, ignore_eos=True)
    batch = [[5, 6, 7]]
    assert tokens(llm.run(batch, params, drafting=deep)) == tokens(llm.run(batch, params, drafting=BASELINE))

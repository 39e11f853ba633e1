"""A step is its stages, a batch is its slots, and no way to draft changes a text."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tests.backends.playing import SAMPLED, WAYS, Player, Text, foresee, new_pair, play, words
from tests.conftest import TINY_DRAFT, needs_native, weights_of

from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Dynamic, NoDraft, Proposal
from aquiline.spec.tree import DraftTree

pytestmark = needs_native

DRAFTS: dict[str, dict[str, Any]] = {
    "plain": {}, "feedback": {"norm_feedback": True}, "part norms": {"fc_norm": True, "norm_feedback": True},
    "one norm": {"norm_before_fc": True},
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=64, seed=0)
FILTERED = SamplingParams(max_tokens=64, temperature=1.1, top_k=20, top_p=0.9, seed=5)


@lru_cache
def pair(draft: str = "plain") -> CpuPair:
    return new_pair(draft=dataclasses.replace(TINY_DRAFT, **DRAFTS[draft]))


@lru_cache
def alone(name: str, number: int, draft: str = "plain") -> Text:
    sampling = (SAMPLED, FILTERED, GREEDY)[number % 3]
    return play(pair(draft), words(5 + 9 * number, number), WAYS[name], 24, sampling=sampling)


def written(player: Player) -> list[bytes]:
    """All storage, to the bit."""
    groups = (player.backend.kv, player.backend.draft_kv)
    stored = [t.tobytes() for group in groups for t in (group.k, group.v)]
    return [*stored, player.backend.fused.tobytes()]


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_step_is_draft_and_verify(draft: str) -> None:
    """Step by step, over a batch of every shape, prompts beside them; and storage is the same behind it."""
    players = [Player(pair(draft), num_slots=len(WAYS)) for _ in range(2)]
    for player in players:
        for i, way in enumerate(WAYS.values()):
            player.add(words(5 + 6 * i, i), way, (SAMPLED, FILTERED, GREEDY)[i % 3])
    for _ in range(20):
        one, two = players[0].step(), players[1].step(in_stages=True)
        assert (one.decodes, one.chunks, one.num_draft_rows) == (two.decodes, two.chunks, two.num_draft_rows)
    assert [t.trees for t in players[0].texts] == [t.trees for t in players[1].texts]
    assert written(players[0]) == written(players[1])
    assert sum(len(step.kept) - 1 for t in players[0].texts for step in t.steps) > 15, "drafts must be accepted here"


@pytest.mark.parametrize("draft", DRAFTS)
def test_a_mixture_is_its_slots(draft: str) -> None:
    """Every shape beside every other: each slot drafts, keeps and ends as it does alone."""
    player = Player(pair(draft), num_slots=2 * len(WAYS))
    for number in range(2):
        for name, way in WAYS.items():
            text = alone(name, number, draft)
            player.add(words(5 + 9 * number, number), way, text.sampling, chunk=3 + len(player.texts))
    player.run(24)
    for i, text in enumerate(player.texts):
        single = alone(list(WAYS)[i % len(WAYS)], i // len(WAYS), draft)
        assert text.tokens == single.tokens and text.trees == single.trees, (i, text.drafting)
        assert [step.draft_end for step in text.steps] == [step.draft_end for step in single.steps]


@pytest.mark.parametrize("name", [name for name in WAYS if name != "none"])
@pytest.mark.parametrize("number", range(3))
def test_no_way_to_draft_changes_a_text(name: str, number: int) -> None:
    drafted, plain = alone(name, number), alone("none", number)
    assert drafted.output[:24] == plain.output[:24]
    assert max(step.num_drafted for step in drafted.steps) == WAYS[name].max_nodes - 1


@pytest.mark.parametrize("width", [0, 2])
def test_the_host_proposes(width: int) -> None:
    """What will come is kept whole, as a chain and behind wrong siblings; the model's drafts wait, and lose no key."""
    plain = alone("none", 0)
    player = Player(pair())
    text = player.add(words(5), Chain(3), propose=lambda t: foresee(t, plain.tokens, width))
    other = player.add(words(14, 1), Dynamic(), FILTERED)
    player.run(16)
    assert text.tokens[: len(plain.tokens)] == plain.tokens[: len(text.tokens)]
    assert [len(step.kept) for step in text.steps[:3]] == [4, 4, 4] and text.steps[0].num_drafted == 3 + width
    assert {step.draft_end for step in text.steps} == {len(words(5))}, "no draft model, no draft keys"
    assert other.trees[:3] == alone("dynamic", 1).trees[:3]
    text.propose = None
    player.step([text])
    same = Player(pair())
    chain = same.add(words(5), Chain(3))
    while len(chain.tokens) < len(text.tokens) - len(text.steps[-1].kept):
        same.step()
    assert text.steps[-1].draft_end == text.steps[-1].root + 1


def test_an_empty_proposal_drafts_nothing() -> None:
    player = Player(pair())
    text = player.add(words(5), Chain(3), propose=lambda t: Proposal(()))
    player.run(8)
    assert text.output[:8] == alone("none", 0).output[:8]
    assert all(step.num_drafted == 0 for step in text.steps) and not player.step().num_draft_rows


def test_the_host_changes_the_trees() -> None:
    """Between the stages the host may cut a tree or plant another; the text stays."""
    rng = np.random.default_rng(0)
    roots: list[int] = []

    def change(tree: DraftTree) -> DraftTree:
        shape, tokens, parents, offsets = tree.topology, [], [], [0]
        for first, end in zip(shape.offsets[:-1], shape.offsets[1:], strict=True):
            roots.append(int(tree.tokens[first]))
            kept = int(rng.integers(1, end - first + 1))  # a parent stands before its children
            extra = [0] * int(rng.integers(0, 3))
            tokens += [*tree.tokens[first : first + kept], *range(1, 1 + len(extra))]
            parents += [*shape.parents[first : first + kept], *extra]
            offsets.append(len(tokens))
        flat = (np.array(a, np.int32) for a in (parents, [0] * len(parents), offsets))
        return DraftTree(type(shape)(*flat), np.array(tokens, np.int32))

    player = Player(pair())
    texts = [player.add(words(5), WAYS[name]) for name in ("deep", "chain3", "none")]
    for _ in range(12):
        player.step(change=change)
    for text in texts:
        assert text.output == alone("none", 0).tokens[5 : 5 + len(text.output)] or len(text.output) > 24
        assert text.output[:20] == alone("none", 0).output[:20][: len(text.output)]
    assert roots


def test_seconds_rows_and_parts() -> None:
    player = Player(pair())
    player.add(words(20), Dynamic())
    player.run(1)
    output = player.step()
    assert set(output.seconds) == {"draft", "verify", "keep"}
    assert all(seconds > 0 for seconds in output.seconds.values()) and output.parts == {}
    assert output.num_draft_rows == 1 + 2 * 2, "the row before the root, and two levels of two"
    player.backend.time_parts(True)
    parts = player.step().parts
    assert all(parts[f"{model}_{part}"] > 0 for model in ("target", "draft") for part in ("attention", "mlp", "head"))
    again = player.step().parts
    assert parts["draft_fusion"] > 0 and again["draft_fusion"] < parts["draft_fusion"] + 1
    player.backend.time_parts(False)
    assert player.step().parts == {}


def test_a_target_without_a_draft() -> None:
    from tests.conftest import tiny_pair

    decoder, _ = tiny_pair()
    player = Player(CpuPair(*weights_of(decoder, None), "float32"))
    text = player.add(words(5), NoDraft(), propose=lambda t: foresee(t, alone("none", 0).tokens))
    player.run(12)
    assert text.output[:12] == alone("none", 0).output[:12] and len(text.steps[0].kept) == 4
    with pytest.raises(ValueError, match="drafts, and there is no draft model"):
        player.add(words(5), Chain(1))
        player.step()

"""The seam on kernels: what no program holds runs step by step, and tells what the twin in torch tells."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.backends.playing import SAMPLED, Player, Text, words
from tests.backends.test_cuts import random_cuts
from tests.gpu.pairs import backend_of, gpu_pair, new_player, told, twin_pair

from aquiline.backends.base import Extend, RowEdits, StepInput, TokenMasks
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Proposal
from aquiline.spec.tree import DraftTree, Topology

FILTERED = dataclasses.replace(SAMPLED, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01)
RULED = dataclasses.replace(
    SAMPLED, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2, logit_bias={3: 2.0}, min_tokens=9
)  # fmt: skip
TOLD = dataclasses.replace(SAMPLED, temperature=0.7, logprobs=2, prompt_logprobs=1)
RULES: dict[str, Any] = {"end_token_ids": frozenset({4, 9}), "bad_words": ((7,), (12, 30))}


def begin(player: Player, way: Drafting = Chain(2), sampling: SamplingParams = SAMPLED, **more: Any) -> Text:
    text = player.add(words(6, 2), way, sampling, chunk=6, **more)
    player.step()
    return text


def cut(player: Player) -> None:
    """A chain that confidence ends, one beside a copy, and a copy alone; nodes chosen by what rows cost."""
    begin(player, cut=random_cuts(3))
    begin(player, cut=random_cuts(4), propose=lambda text: Proposal((5, 6)))
    begin(player, NoDraft(), propose=lambda text: Proposal((5, 6, 7), (-1, -1, 1)))
    player.step()
    player.row_costs = lambda: tuple(0.1 * n for n in range(9))
    player.step()


def ruled(player: Player) -> None:
    begin(player, sampling=RULED, **RULES)
    begin(player, Dynamic(), FILTERED)
    player.step()


def logprobs(player: Player) -> None:
    begin(player, sampling=TOLD)
    player.step()


def guided(player: Player) -> None:
    """Masks and edits of every row, in stages."""

    def masks(tree: DraftTree, step: StepInput) -> TokenMasks:
        return np.random.default_rng(len(tree.tokens)).integers(-(2**31), 2**31, (len(tree.tokens), 3)).astype(np.int32)

    def edits(tree: DraftTree, step: StepInput) -> RowEdits:
        return [lambda logits: logits.__iadd__(np.arange(96, dtype=np.float32) / 9) for _ in tree.tokens]

    begin(player)
    player.step(masks=masks)
    player.step(masks=masks, edits=edits)


def planted(player: Player) -> None:
    """A tree that the host made, after the draft's was read; then the draft goes on."""

    def change(tree: DraftTree) -> DraftTree:
        tokens = np.array([tree.tokens[0], 5, 6, *tree.tokens[1:]], np.int32)
        flat = (np.array(a, np.int32) for a in ([0, 0, 1, 0, 3], [0, 1, 2, 1, 2], [0, 5]))
        return DraftTree(Topology(*flat), tokens)

    begin(player)
    player.step(change=change)
    player.step(in_stages=True)


def extended(player: Player) -> None:
    """Draft keys that are missing because nothing was drafted, and some that are asked for."""
    text = begin(player, NoDraft(), drafts=True)
    for _ in range(4):
        player.step()
    player.extends.append(Extend(text.slot, 8))
    player.step()
    text.drafting = Chain(1)
    player.step()


def cached(player: Player) -> None:
    """A prompt that begins with cached pages, whole and in part."""
    first = begin(player)
    hit = player.pages[first.slot][:1]
    player.add(words(6, 2), Chain(1), SAMPLED, hit=hit, slot=2)
    player.add(words(4, 2), NoDraft(), SAMPLED, hit=hit, slot=3)
    player.step(), player.step()


SCRIPTS: dict[str, Callable[[Player], None]] = {
    script.__name__: script for script in (cut, ruled, logprobs, guided, planted, extended, cached)
}


@pytest.mark.rare
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_twins_tell_alike(name: str) -> None:
    players = [new_player(pair) for pair in (gpu_pair(), twin_pair())]
    for player in players:
        SCRIPTS[name](player)
    for ours, theirs in zip(*(player.texts for player in players), strict=True):
        assert told(ours) == told(theirs), ours.drafting
        for own, other in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            assert [(e.token_id, e.rank, [*e.top]) for e in own] == [(e.token_id, e.rank, [*e.top]) for e in other]
            assert np.allclose([e.logprob for e in own], [e.logprob for e in other], rtol=0, atol=1e-5)


@pytest.mark.rare
def test_a_text_does_not_depend_on_which_way_its_steps_ran() -> None:
    """Half of the steps by a program, half kernel by kernel: the same draws, to the bit."""
    texts = []
    for asks in (False, True):
        player = new_player(gpu_pair())
        sampling = dataclasses.replace(SAMPLED, logprobs=0) if asks else SAMPLED
        text = begin(player, sampling=sampling)
        for _ in range(4):
            player.step()
        assert bool(backend_of(player).programs) is not asks
        texts.append((text.tokens, text.trees))
    assert texts[0] == texts[1]


@pytest.mark.rare
def test_documents_are_scored() -> None:
    documents = [np.array(words(9, i), np.int32) for i in range(2)]
    ours, theirs = (new_player(pair).backend.score(documents) for pair in (gpu_pair(), twin_pair()))
    for name in ("hidden", "features", "best_logprob"):
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), rtol=0, atol=1e-4)
    assert ours.best.tolist() == theirs.best.tolist()

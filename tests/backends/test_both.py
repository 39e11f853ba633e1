"""The draft model's chain and the host's copy in one tree: which nodes it has, and that nothing else changes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from tests.backends.playing import Player, Text, words
from tests.backends.runs_on import BACKENDS
from tests.backends.test_cuts import ALL, CHAIN_ALONE, PROBE, SAMPLINGS, grown, pair, plain, random_cuts
from tests.backends.test_torch_backend import no_host_reads
from tests.conftest import needs_native

from aquiline.spec.confidence import Cut, Guess
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal
from aquiline.spec.tree import DraftTree, Topology

LENGTHS = (1, 3, 6, 4)
NEW = 24


def roots_alone(tree: DraftTree) -> DraftTree:
    """No drafted node."""
    first = tree.topology.offsets[:-1]
    zeros = np.zeros(len(first), np.int32)
    return DraftTree(Topology(zeros, zeros, np.arange(len(first) + 1, dtype=np.int32)), tree.tokens[first])


@lru_cache
def guesses(sampling: str, number: int) -> dict[int, list[Guess]]:
    """By root, what six levels of the draft guess in a text that is written token by token."""
    player = Player(pair("native"))
    text = player.add(
        words(5 + 6 * number, number), Chain(6), SAMPLINGS[sampling], cut=lambda: CHAIN_ALONE,
        end_token_ids=frozenset((1, 2)),
    )  # fmt: skip
    player.run(NEW + 8, change=roots_alone)
    return {step.root: step.guesses for step in text.steps}


def merged(chain: tuple[list[int], list[int]], copied: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Tokens and parents below the root of a tree with a cut, and a copy joined to it."""
    tokens, parents = [*chain[0]], [*chain[1]]
    node = 0
    for token in copied:
        below = [i for i in range(1, len(tokens) + 1) if parents[i - 1] == node and tokens[i - 1] == token]
        if not below:
            tokens.append(token)
            parents.append(node)
            below = [len(tokens)]
        (node,) = below
    return tokens, parents


class Copying:
    """Copies that are alike to the draft's chain in every way: as far as some level, then its runner-up there, what
    the text goes on with, or anything; some have no token, some are longer than the chain."""

    def __init__(self, sampling: str, number: int, seed: int) -> None:
        self.rng = np.random.default_rng([seed, number])
        self.guesses, self.future = guesses(sampling, number), plain("native", sampling, number)
        self.told: list[tuple[int, ...] | None] = []

    def __call__(self, text: Text) -> Proposal | None:
        root, rng = len(text.tokens) - 1, self.rng
        levels, alike = self.guesses.get(root, []), int(rng.integers(0, 5))
        tokens = [guess.token for guess in levels[:alike]]
        if rng.random() < 0.4 and len(levels) > alike and levels[alike].runner_up >= 0:
            tokens.append(levels[alike].runner_up)
        rest = int(rng.integers(0, 6))
        if rng.random() < 0.5:
            tokens = [*self.future[root + 1 :][:rest], *tokens[rest:]]
        tokens += rng.integers(0, 96, rest).tolist()
        way = rng.random()
        self.told.append(None if way < 0.1 else () if way < 0.2 else tuple(tokens))
        return None if self.told[-1] is None else Proposal(self.told[-1])


def mixed(name: str, sampling: str, seed: int, **how: Any) -> tuple[list[Text], list[list[Cut]], list[Copying]]:
    """Chains with a cut and a copy of their own in every step, beside plain decoding and copies alone."""
    player, cuts, copies = Player(pair(name), num_slots=7), list[list[Cut]](), list[Copying]()
    for number, length in enumerate((*LENGTHS, 3)):
        draw, own, copying = random_cuts(100 * seed + number), list[Cut](), Copying(sampling, number, seed)

        def cut(draw: Any = draw, own: list[Cut] = own) -> Cut:
            own.append(draw())
            return own[-1]

        is_copy = number == len(LENGTHS)
        way: Drafting = NoDraft() if is_copy else Chain(length)
        more = {"drafts": True} if is_copy else {"cut": cut}
        player.add(
            words(5 + 6 * number, number), way, SAMPLINGS[sampling], propose=copying, end_token_ids=frozenset((1, 2)),
            **more,
        )  # fmt: skip
        cuts.append(own)
        copies.append(copying)
    player.add(words(9), NoDraft(), SAMPLINGS[sampling])
    player.run(NEW, **how)
    return player.texts, cuts, copies


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_trees_join_chain_and_copy_and_texts_stay(name: str, sampling: str) -> None:
    """What the draft guesses is what it guesses in a text written token by token: its keys are right whichever branch
    was accepted before. No two children of a node are the same."""
    num_copied = num_shared = 0
    for seed in range(2):
        texts, cuts, copies = mixed(name, sampling, seed)
        for number, length in enumerate(LENGTHS):
            text, expected = texts[number], guesses(sampling, number)
            assert text.output[:NEW] == plain("native", sampling, number)[5 + 6 * number :][:NEW]
            for step, (tokens, parents, path) in enumerate(text.trees):
                done, cut, copied = text.steps[step], cuts[number][step], copies[number].told[step] or ()
                *chain, num_levels = grown(text, step, cut, length)
                assert (tokens[1:], parents[1:]) == merged(tuple(chain), copied)
                assert len(done.guesses) == num_levels and done.guesses == expected[done.root][:num_levels]
                assert done.num_drafted == len(tokens) - 1
                assert len({*zip(parents[1:], tokens[1:], strict=True)}) == done.num_drafted
                num_shared += len(chain[0]) + len(copied) - done.num_drafted
                num_copied += path[-1] > len(chain[0])
        alone = texts[len(LENGTHS)]
        assert alone.output[:NEW] == plain("native", sampling, len(LENGTHS))[5 + 6 * len(LENGTHS) :][:NEW]
    assert num_copied > 10 and num_shared > 20


@needs_native
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_twins_join_alike(sampling: str) -> None:
    (native, *_), (torch, *_) = (mixed(name, sampling, 7) for name in ("native", "torch"))
    for ours, theirs in zip(native, torch, strict=True):
        assert ours.tokens == theirs.tokens and ours.trees == theirs.trees
        assert [(s.guesses, s.draft_end, s.kept) for s in ours.steps] == [
            (s.guesses, s.draft_end, s.kept) for s in theirs.steps
        ]


@pytest.mark.parametrize("name", BACKENDS)
def test_stages_join_as_the_step_does(name: str) -> None:
    (one, *_), (two, *_) = mixed(name, "sampled", 3), mixed(name, "sampled", 3, in_stages=True)
    for text, same in zip(one, two, strict=True):
        assert text.tokens == same.tokens and text.trees == same.trees and text.steps == same.steps


@pytest.mark.parametrize("name", BACKENDS)
def test_a_copy_that_goes_on_behind_the_chain_makes_it_longer(name: str) -> None:
    """And one that is the chain, or ends at a runner-up, adds no node."""
    levels = guesses("sampled", 1)[11]
    tokens, seconds = [guess.token for guess in levels], [guess.runner_up for guess in levels]
    for copied, cut, wanted in (
        ((*tokens[:3], 5, 6), CHAIN_ALONE, ([*tokens[:3], 5, 6], [0, 1, 2, 3, 4])),
        (tuple(tokens[:2]), CHAIN_ALONE, (tokens[:3], [0, 1, 2])),
        ((tokens[0], seconds[1]), ALL, ([*tokens[:3], *seconds[:3]], [0, 1, 2, 0, 1, 2])),
        ((tokens[0], seconds[1], 7), ALL, ([*tokens[:3], *seconds[:3], 7], [0, 1, 2, 0, 1, 2, 5])),
        ((7, 8), PROBE, ([7, 8], [0, 1])),
        ((), PROBE, ([], [])),
    ):  # fmt: skip
        player = Player(pair(name))
        text = player.add(
            words(11, 1), Chain(3), SAMPLINGS["sampled"], propose=lambda _, copied=copied: Proposal(copied),
            cut=lambda cut=cut: cut, end_token_ids=frozenset((1, 2)),
        )  # fmt: skip
        while not text.steps:
            player.step()
        found, parents, _ = text.trees[0]
        assert (found[1:], parents[1:]) == wanted


@needs_native
def test_a_slot_that_cannot_draft_yet_verifies_the_copy_alone() -> None:
    prompt = words(32)
    player = Player(pair("native"))
    first = player.add(prompt, NoDraft(), SAMPLINGS["sampled"])
    player.run(6)
    hit = player.pages[first.slot][:2]
    text = player.add(
        prompt, Chain(3), SAMPLINGS["sampled"], hit=hit, first_draft_key=33, propose=lambda _: Proposal((7, 8)),
        cut=lambda: CHAIN_ALONE,
    )  # fmt: skip
    player.run(6)
    assert text.output[:6] == first.output[:6]
    assert text.trees[0][0][1:] == [7, 8] and text.steps[0].guesses == [] and len(text.steps[1].guesses) == 3


def test_a_step_with_both_reads_nothing_back() -> None:
    player = Player(pair("torch"))
    texts = [
        player.add(
            words(9 + i), Chain(3), SAMPLINGS["sampled"], cut=random_cuts(i), propose=lambda _, i=i: Proposal((5,) * i)
        )
        for i in range(3)
    ]
    while not all(text.steps for text in texts):
        player.step()
    for _ in range(4):
        message = player.next_step()
        with no_host_reads():
            pending = player.backend.step(message)
        player.note(message, pending.read())
    assert all(len(text.steps) > 4 for text in texts)

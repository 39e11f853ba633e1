"""Chains that end where the draft is unsure: what is drafted, what is said of it, and that no text depends on it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.playing import SAMPLED, WAYS, Player, Text, words
from tests.backends.runs_on import BACKENDS, pair_on
from tests.backends.test_torch_backend import no_host_reads
from tests.conftest import TINY_DRAFT, needs_native, tiny_pair, weights_of

from aquiline.backends.base import Decode, StepInput
from aquiline.config import SamplingParams
from aquiline.spec.confidence import NUM_MARGINS, Cut, Guess, most_nodes
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal, Static

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=64, seed=0), "sampled": SAMPLED,
    "filtered": SamplingParams(max_tokens=64, temperature=1.1, top_k=20, top_p=0.9, seed=5),
    "ruled": SamplingParams(max_tokens=64, temperature=2.0, seed=2, repetition_penalty=1.3, min_tokens=9),
}  # fmt: skip
ALL = Cut((1.0,) * NUM_MARGINS, (1.0,) * NUM_MARGINS, 0.0, 0.0)
CHAIN_ALONE = Cut((1.0,) * NUM_MARGINS, (0.0,) * NUM_MARGINS, 0.5, 0.0)
PROBE = ALL._replace(least_node=math.inf)


@lru_cache
def pair(name: str) -> Any:
    draft = dataclasses.replace(TINY_DRAFT, norm_feedback=True)
    return pair_on(name, *weights_of(*tiny_pair(draft=draft)))


def random_cuts(seed: int) -> Callable[[], Cut]:
    """Another cut at each call: chances and limits over their whole ranges, and at their ends."""
    rng = np.random.default_rng(seed)

    def next_cut() -> Cut:
        chances, seconds = rng.uniform(0, 1, (2, NUM_MARGINS)) ** rng.choice([0.1, 1, 4], (2, 1))
        least_node, least_pass = rng.choice(
            [0, 0.02, 0.1, 0.3, 0.6, 1, math.inf], 2, p=[0.2, 0.2, 0.2, 0.2, 0.1, 0.05, 0.05]
        )
        return Cut(tuple(chances.tolist()), tuple(seconds.tolist()), float(least_node), float(least_pass))

    return next_cut


@lru_cache
def plain(name: str, sampling: str, number: int) -> list[int]:
    player = Player(pair(name))
    text = player.add(words(5 + 6 * number, number), NoDraft(), SAMPLINGS[sampling], end_token_ids=frozenset((1, 2)))
    player.run(30)
    return text.tokens


def grown(text: Text, step: int, cut: Cut, length: int) -> tuple[list[int], list[int], int]:
    """Tokens and parents below the root, and how many levels are drafted, by what was guessed: the rule of Cut, in
    plain float32."""
    chances, seconds = np.float32(cut.chances), np.float32(cut.seconds)
    least_node, least_pass = np.float32(cut.least_node), np.float32(cut.least_pass)
    chain, leaves, chance, levels = list[int](), list[tuple[int, int]](), np.float32(1), 0
    for level, guess in enumerate(text.steps[step].guesses):
        levels += 1
        if guess.runner_up >= 0 and chance * seconds[guess.margin] >= least_node:
            leaves.append((guess.runner_up, level))
        chance = chance * chances[guess.margin]
        if chance < least_node:
            break
        chain.append(guess.token)
        if chance < least_pass or level + 1 == length:
            break
    parents = [*range(len(chain)), *(parent for _, parent in leaves)]
    return [*chain, *(token for token, _ in leaves)], parents, levels


def mixed(name: str, sampling: str, seed: int, **how: Any) -> tuple[Player, list[list[Cut | None]]]:
    """Chains with a cut of their own in each step, beside chains, trees and plain decoding."""
    ways: list[Drafting] = [
        Chain(1),
        Chain(3),
        WAYS["static"],
        Chain(6),
        Chain(3),
        NoDraft(),
        WAYS["dynamic"],
        Chain(5),
    ]
    player, told = Player(pair(name), num_slots=len(ways)), list[list[Cut | None]]()
    for i, way in enumerate(ways):
        draw, own = random_cuts(100 * seed + i), list[Cut | None]()

        def cut(
            way: Drafting = way, i: int = i, draw: Callable[[], Cut] = draw, own: list[Cut | None] = own
        ) -> Cut | None:
            own.append(draw() if isinstance(way, Chain) and i != 4 else None)
            return own[-1]

        told.append(own)
        player.add(words(5 + 6 * i, i), way, SAMPLINGS[sampling], cut=cut, end_token_ids=frozenset((1, 2)))
    player.run(20, **how)
    return player, told


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(2))
def test_no_cut_changes_a_text(name: str, sampling: str, seed: int) -> None:
    """And trees are those that follow from the guesses."""
    player, told = mixed(name, sampling, seed)
    leaves = levels = 0
    for number, (text, cuts) in enumerate(zip(player.texts, told, strict=True)):
        assert text.output[:20] == plain(name, sampling, number)[5 + 6 * number :][:20]
        for step, (tokens, parents, path) in enumerate(text.trees):
            cut, done = cuts[step], text.steps[step]
            if cut is None:
                assert done.guesses == []
                continue
            assert isinstance(text.drafting, Chain)
            length = text.drafting.num_spec_tokens
            assert (tokens[1:], parents[1:], len(done.guesses)) == grown(text, step, cut, length)
            assert done.num_drafted == len(tokens) - 1 < most_nodes(length)
            leaves += path != list(range(len(path)))
            levels += len(path) - 1
    assert sampling != "sampled" or (levels > 10 and leaves > 1), "both kinds of nodes are accepted here"


@needs_native
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_twins_guess_the_same(sampling: str) -> None:
    (native, _), (torch, _) = (mixed(name, sampling, 7) for name in ("native", "torch"))
    for ours, theirs in zip(native.texts, torch.texts, strict=True):
        assert ours.tokens == theirs.tokens and ours.trees == theirs.trees
        assert [step.guesses for step in ours.steps] == [step.guesses for step in theirs.steps]
        assert [step.draft_end for step in ours.steps] == [step.draft_end for step in theirs.steps]
    margins = {guess.margin for text in native.texts for step in text.steps for guess in step.guesses}
    assert len(margins) > 4


@pytest.mark.parametrize("name", BACKENDS)
def test_stages_and_steps_cut_the_same(name: str) -> None:
    (one, _), (two, _) = mixed(name, "sampled", 3), mixed(name, "sampled", 3, in_stages=True)
    for text, same in zip(one.texts, two.texts, strict=True):
        assert text.tokens == same.tokens and text.trees == same.trees and text.steps == same.steps


@needs_native
@settings(max_examples=20)
@given(st.integers(1, 16), st.integers(0, 2**32 - 1), st.sampled_from(sorted(SAMPLINGS)))
def test_any_cuts_keep_the_text_of_any_chain(length: int, seed: int, sampling: str) -> None:
    """And each slot drafts what it would draft alone, in no more rows than its levels."""
    number = 2
    player = Player(pair("native"))
    draw, told = random_cuts(seed), list[Cut]()

    def cut() -> Cut:
        told.append(draw())
        return told[-1]

    text = player.add(words(17, number), Chain(length), SAMPLINGS[sampling], cut=cut, end_token_ids=frozenset((1, 2)))
    while len(text.output) < 20:
        behind = text.steps[-1].draft_end if text.steps else text.num_prompt
        output = player.step()
        if output.decodes:
            done = text.steps[-1]
            caught_up = max(1, done.root + 1 - behind)
            assert output.num_draft_rows == caught_up + len(done.guesses) - 1
    assert text.output[:20] == plain("native", sampling, number)[17:37]
    for step, (tokens, parents, _) in enumerate(text.trees):
        assert (tokens[1:], parents[1:], len(text.steps[step].guesses)) == grown(text, step, told[step], length)


@pytest.mark.parametrize("name", BACKENDS)
def test_cuts_that_keep_all_are_the_chain(name: str) -> None:
    """With chances of one the chain has its whole length; without second choices it is the chain without a cut."""
    trees: list[list[Any]] = []
    for cut in (None, CHAIN_ALONE, ALL):
        player = Player(pair(name))
        text = player.add(words(9), Chain(4), SAMPLED, cut=lambda cut=cut: cut)
        player.run(16)
        trees.append([[tokens[: 4 + 1], parents[: 4 + 1]] for tokens, parents, _ in text.trees[:1]])
        if cut is ALL:
            tokens, parents, _ = text.trees[0]
            assert parents == [0, 0, 1, 2, 3, 0, 1, 2, 3] and len(tokens) == most_nodes(4)
            assert tokens[5:] == [guess.runner_up for guess in text.steps[0].guesses]
        elif cut is not None:
            assert all(step.num_drafted == 4 and len(step.guesses) == 4 for step in text.steps)
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_probe_runs_one_pass_and_verifies_nothing(name: str) -> None:
    player = Player(pair(name))
    text, chain = (player.add(words(6), Chain(4), SAMPLED, cut=lambda cut=cut: cut) for cut in (PROBE, CHAIN_ALONE))
    player.step()
    output = player.step()
    assert text.steps[0].num_drafted == 0 and text.steps[0].guesses == chain.steps[0].guesses[:1]
    assert len(chain.steps[0].guesses) == 4 and output.num_draft_rows == (2 + 3 if name == "native" else 2 * 4)
    alone = Player(pair(name))
    alone.add(words(6), Chain(4), SAMPLED, cut=lambda: PROBE)
    alone.step()
    assert alone.step().num_draft_rows == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_the_only_possible_token_has_no_runner_up(name: str) -> None:
    player = Player(pair(name))
    sampling = dataclasses.replace(SAMPLED, top_k=1)
    text = player.add(words(9), Chain(3), sampling, cut=lambda: ALL)
    player.run(8)
    guesses = [guess for step in text.steps for guess in step.guesses]
    assert {(guess.runner_up, guess.margin) for guess in guesses} == {(-1, NUM_MARGINS - 1)}
    assert all(step.num_drafted == 3 for step in text.steps)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_draft_whose_logits_are_not_numbers(name: str) -> None:
    decoder, head = tiny_pair()
    head.norm.data[5] = float("nan")
    player = Player(pair_on(name, *weights_of(decoder, head)))
    text, plain_text = player.add(words(5), Chain(3), cut=lambda: ALL), player.add(words(5), NoDraft())
    player.run(12)
    assert text.output[:12] == plain_text.output[:12]
    assert {guess for step in text.steps for guess in step.guesses} == {Guess(int(head.d2t[0]), -1, 0)}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    ("decode", "message"),
    [
        (Decode(0, NoDraft(), cut=ALL), "cut of slot 0: only a chain that the draft model drafts has one"),
        (Decode(0, Static(), cut=ALL), "cut of slot 0: only a chain"),
        (Decode(0, Chain(2), Proposal((1, 2), (-1, -1)), cut=ALL), "entry 1 follows entry -1, beside a cut it"),
        (Decode(0, Chain(4), Proposal((1,) * 248), cut=ALL), "a proposal of 248 tokens beside a cut: trees have"),
        (Decode(0, Chain(2), cut=ALL._replace(chances=(1.0,) * 7)), "must have 8 chances and 8 seconds"),
        (Decode(0, Chain(2), cut=ALL._replace(seconds=(1.0,) * 9)), "must have 8 chances and 8 seconds"),
        (Decode(0, Chain(2), cut=ALL._replace(chances=(*(1.0,) * 7, 1.5))), r"chances\[7\]=1.5: must be in \[0, 1\]"),
        (Decode(0, Chain(2), cut=ALL._replace(seconds=(-0.5, *(1.0,) * 7))), r"seconds\[0\]=-0.5: must be in \[0, 1\]"),
        (Decode(0, Chain(2), cut=ALL._replace(least_node=math.nan)), "least_node=nan, least_pass=0: must be at le"),
        (Decode(0, Chain(2), cut=ALL._replace(least_pass=-1.0)), "least_node=0, least_pass=-1: must be at least 0"),
    ],
)  # fmt: skip
def test_cuts_that_are_refused(name: str, decode: Decode, message: str) -> None:
    player = Player(pair(name))
    text = player.add(words(9), Chain(4), SAMPLED, cut=lambda: ALL)
    player.run(2)
    with pytest.raises(ValueError, match=message):
        player.backend.step(StepInput((decode,)))
    player.run(20)
    whole = Player(pair(name))
    same = whole.add(words(9), NoDraft(), SAMPLED)
    whole.run(20)
    assert text.output[:20] == same.output[:20]


def test_a_step_with_cuts_reads_nothing_back() -> None:
    player = Player(pair("torch"))
    texts = [player.add(words(9 + i), Chain(3), SAMPLED, cut=random_cuts(i)) for i in range(3)]
    while not all(text.steps for text in texts):
        player.step()
    for _ in range(4):
        message = player.next_step()
        with no_host_reads():
            pending = player.backend.step(message)
        player.note(message, pending.read())
    assert all(len(text.steps) > 4 for text in texts)

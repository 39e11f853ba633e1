"""The nodes that cuts let through are chosen together, by what so many rows cost: on both backends, against a search
through all choices, and without a change of any text."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests.backends.playing import Player, Text, words
from tests.backends.runs_on import BACKENDS
from tests.backends.test_cuts import ALL, SAMPLINGS, grown, pair, random_cuts
from tests.conftest import needs_native

from aquiline.backends.base import Decode, StepInput
from aquiline.spec.confidence import Cut
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal

LENGTHS = (4, 1, 0, 4, 6)
"""Of the chains that play together; 0: a text that is plain, or copies."""


def random_costs(seed: int) -> tuple[float, ...]:
    """Costs with edges, as tiles of rows have; now and then too short for all nodes, or none."""
    rng = np.random.default_rng(seed)
    steps = rng.choice([0.0, 0.05, 0.3, 1.5], 48, p=[0.4, 0.3, 0.2, 0.1])
    costs = np.float32(rng.uniform(0, 2) + np.cumsum(steps))
    return tuple(costs[: rng.choice([0, 1, 3, 48], p=[0.1, 0.05, 0.15, 0.7])].tolist())


class Played(NamedTuple):
    player: Player
    texts: list[Text]
    cuts: list[list[Cut]]  # of each text and step
    costs: list[tuple[float, ...]]  # of each step


def together(
    name: str, sampling: str, seed: int, copies: bool = False, in_stages: bool = False, equal: bool = False
) -> Played:
    """Chains with cuts of their own at every step, and a text that drafts nothing or copies three tokens. equal: all
    nodes are equally likely, and another number of them is free in each step."""
    player, costs, told = Player(pair(name), num_slots=len(LENGTHS)), list[tuple[float, ...]](), list[list[Cut]]()

    def next_costs() -> tuple[float, ...]:
        number = 1000 * seed + len(costs)
        costs.append((*(0.0,) * (1 + 7 * number % 23), *(99.0,) * 30) if equal else random_costs(number))
        return costs[-1]

    player.row_costs = next_costs
    for i, length in enumerate(LENGTHS):
        draw, own = (lambda: ALL) if equal else random_cuts(100 * seed + i), list[Cut]()

        def cut(draw: Any = draw, own: list[Cut] = own) -> Cut:
            own.append(draw())
            return own[-1]

        way: Drafting = Chain(length) if length else NoDraft()
        settings: dict[str, Any] = {"cut": cut} if length else {}
        if copies and not length:
            settings["propose"] = lambda text: Proposal(tuple(words(3, len(text.tokens))))
        player.add(words(9, i), way, SAMPLINGS[sampling], chunk=16, end_token_ids=frozenset((1, 2)), **settings)
        told.append(own)
    texts = list(player.texts)
    player.step()
    for _ in range(15):
        player.step(in_stages=in_stages)
    return Played(player, texts, told, costs)


def chosen(played: Played, step: int, num_copied: int) -> list[tuple[list[int], list[int]]]:
    """Tokens and parents below each root, by trying every number of the likeliest nodes."""
    nodes = []  # chance, place in the order, text, number in its whole tree
    whole = []
    for number, (text, cuts, length) in enumerate(zip(played.texts, played.cuts, LENGTHS, strict=True)):
        tokens, parents, levels = grown(text, step, cuts[step], length) if length else ([], [], 0)
        whole.append((tokens, parents))
        if not length:
            continue
        guesses, chances, seconds = text.steps[step].guesses, cuts[step].chances, cuts[step].seconds
        above = [np.float32(1)]
        for guess in guesses:
            above.append(above[-1] * np.float32(chances[guess.margin]))
        num_chain = levels - (above[-1] < np.float32(cuts[step].least_node))
        for i, parent in enumerate(parents):
            if i < num_chain:
                nodes.append((above[i + 1], (number, i, 0), number, i))
            else:
                second = above[parent] * np.float32(seconds[guesses[parent].margin])
                nodes.append((second, (number, parent, 1), number, i))
    costs = played.costs[step]
    if not costs:
        return whole
    nodes.sort(key=lambda node: (-float(node[0]), node[1]))
    most, best = 0.0, 0
    for count in range(1, len(nodes) + 1):
        if num_copied + count >= len(costs):
            break
        worth = sum(float(node[0]) for node in nodes[:count])
        worth -= float(np.float32(costs[num_copied + count])) - float(np.float32(costs[num_copied]))
        if worth > most:
            most, best = worth, count
    found = []
    for number, (tokens, parents) in enumerate(whole):
        kept = sorted(i for _, _, text, i in nodes[:best] if text == number)
        found.append(([tokens[i] for i in kept], [parents[i] for i in kept]))
    return found


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
@pytest.mark.parametrize("copies", [False, True])
def test_the_likeliest_nodes_that_pay_together_are_verified(name: str, sampling: str, copies: bool) -> None:
    dropped = kept = 0
    for seed in range(3):
        played = together(name, sampling, seed, copies)
        for step in range(15):
            expected = chosen(played, step, 3 if copies else 0)
            for text, length, (tokens, parents), cuts in zip(played.texts, LENGTHS, expected, played.cuts, strict=True):
                if not length:
                    continue
                tree = text.trees[step]
                assert (tree[0][1:], tree[1][1:]) == (tokens, parents)
                dropped += len(grown(text, step, cuts[step], length)[0]) - len(tokens)
                kept += len(tokens)
    assert dropped > 50 and kept > 50


@pytest.mark.parametrize("name", BACKENDS)
def test_of_equally_likely_nodes_the_first_are_verified(name: str) -> None:
    """By decodes, then levels, a token before its runner-up, whichever chains the backend grows together."""
    dropped = kept = 0
    for seed in range(3):
        played = together(name, "sampled", seed, equal=True)
        for step in range(15):
            for text, length, (tokens, parents) in zip(played.texts, LENGTHS, chosen(played, step, 0), strict=True):
                if length:
                    assert (text.trees[step][0][1:], text.trees[step][1][1:]) == (tokens, parents)
                    dropped += not tokens
                    kept += len(tokens)
    assert dropped > 50 and kept > 50


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_no_costs_change_a_text(name: str, sampling: str) -> None:
    played = together(name, sampling, 5, copies=True)
    alone = Player(pair(name), num_slots=len(LENGTHS))
    for i in range(len(LENGTHS)):
        alone.add(words(9, i), NoDraft(), SAMPLINGS[sampling], chunk=16, end_token_ids=frozenset((1, 2)))
    alone.run(48)
    for text, same in zip(played.texts, alone.texts, strict=True):
        count = min(len(text.output), len(same.output))
        assert count >= 15 and text.output[:count] == same.output[:count]


@needs_native
def test_twins_and_stages_choose_the_same() -> None:
    one, two, three = (
        together(name, "sampled", 9, copies=True, in_stages=in_stages)
        for name, in_stages in (("native", False), ("torch", False), ("native", True))
    )
    for text, torch, stages in zip(one.texts, two.texts, three.texts, strict=True):
        assert text.tokens == torch.tokens == stages.tokens and text.trees == torch.trees == stages.trees


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("cost", [math.nan, math.inf])
def test_costs_that_are_refused(name: str, cost: float) -> None:
    player = Player(pair(name))
    player.add(words(9), Chain(4), cut=lambda: ALL)
    player.run(2)
    message = StepInput((Decode(0, Chain(4), cut=ALL),), row_costs=(0.0, cost))
    with pytest.raises(ValueError, match=r"row_costs\[1\]=(nan|inf): must be a finite number"):
        player.backend.step(message)
    player.run(8)

"""What the draft says of a chain with a cut equals what the bundled draft says in forwards of its own."""

from __future__ import annotations

import dataclasses
import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.backends.playing import Player
from tests.backends.playing import Text as Played
from tests.conftest import needs_native
from tests.engine.pair_apart import Text
from tests.engine.test_trees_apart import SAMPLINGS as UNSEEDED
from tests.engine.test_trees_apart import bundled, prompt

from aquiline.spec.confidence import MARGIN_BOUNDS, NUM_MARGINS, Cut
from aquiline.spec.drafting import Chain, NoDraft

pytestmark = needs_native

LENGTH, COUNT = 5, 40
SAMPLINGS = {name: dataclasses.replace(s, seed=s.seed or 0) for name, s in UNSEEDED.items()}


def cut_at(step: int) -> Cut:
    """Chances that grow with the margin, and other limits from step to step."""
    chances = np.linspace(0.35, 0.99, NUM_MARGINS)
    limits = ((0.05, 0.2), (0.3, 0.3), (0.0, 0.0), (0.5, 0.1), (math.inf, 0.0))
    return Cut(tuple(chances.tolist()), tuple((0.6 * (1 - chances)).tolist()), *limits[step % len(limits)])


@cache
def played(sampling: str) -> Played:
    """A text of the bundled pair whose chains were cut, beside one that was not drafted at all."""
    pair: Any = bundled().models.pair
    player = Player(pair, num_slots=2)
    steps = iter(range(1000))
    text = player.add(prompt(), Chain(LENGTH), SAMPLINGS[sampling], cut=lambda: cut_at(next(steps)), chunk=48)
    plain = player.add(prompt(), NoDraft(), SAMPLINGS[sampling], chunk=48)
    player.run(COUNT)
    assert text.output[:COUNT] == plain.output[:COUNT]
    return text


def bucket(margin: float) -> int:
    return sum(margin >= bound for bound in MARGIN_BOUNDS)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_guesses_are_those_of_the_draft_alone(sampling: str) -> None:
    text = played(sampling)
    alone = Text(text.tokens, SAMPLINGS[sampling])
    margins = set[int]()
    for step in text.steps:
        path: tuple[int, ...] = ()
        for guess in step.guesses:
            tokens, logprobs = alone.children(step.root, path)
            margin = logprobs[0] - logprobs[1]
            assert (guess.token, guess.runner_up) == (tokens[0], tokens[1])
            assert guess.margin in {bucket(margin - 1e-3), bucket(margin + 1e-3)}
            margins.add(guess.margin)
            path = (*path, guess.token)
    assert len(margins) > 5


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_what_is_accepted(sampling: str) -> None:
    """Of every chain the tokens that the text goes on with, and a second choice where it goes on with that."""
    text = played(sampling)
    num_leaves = 0
    for step, (tokens, parents, path) in zip(text.steps, text.trees, strict=True):
        ahead, node, expected = text.tokens[step.root + 1 :], 0, [0]
        for token in ahead:
            children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == token]
            if not children:
                break
            (node,) = children
            expected.append(node)
        assert path == expected and step.kept == ahead[: len(path)]
        num_leaves += path[-1] >= len(path)
    assert num_leaves > 1 and sum(len(path) - 1 for _, _, path in text.trees) > 15

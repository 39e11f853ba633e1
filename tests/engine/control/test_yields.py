"""What rivals bring, learnt from steps of any of them."""

from __future__ import annotations

import random

import pytest

from aquiline.engine.control.yields import CHAIN_LEVELS, PLANNED, Yields

CHAIN, CHAIN_2, CHAIN_3 = (CHAIN_LEVELS.index(levels) for levels in (1, 2, 3))


def test_chains_and_plans_are_compared_on_the_same_texts() -> None:
    """A chain meets easy texts only in its turns, a plan all. It brings a tenth of a token more there."""
    yields, rng = Yields(), random.Random(1)
    for number in range(4_000):
        is_easy = number // 100 % 2 == 0
        is_right = rng.random() < (0.7 if is_easy else 0.1)
        if is_easy and number % 2 == 0:
            yields.add_chain(CHAIN, [1 + is_right])
        else:
            further = is_right + (rng.random() < 0.1)
            yields.add_planned(1, 1 + further, 1, further, is_right)
    assert yields.further(PLANNED) - yields.further(CHAIN) == pytest.approx(0.1, abs=0.03)
    assert yields.further(CHAIN) == pytest.approx(0.4, abs=0.05)


def test_a_chain_is_not_taken_for_a_plan_that_seldom_drafts() -> None:
    """Whatever first tokens are believed to be right then. One of ten steps drafts for both sequences, which brings
    them three further tokens."""
    yields = Yields()
    for number in range(400):
        yields.add_planned(2, *((5, 2, 3) if number % 10 == 5 else (2, 0, 0)), 1.6)
        if number % 10 == 0:
            yields.add_chain(CHAIN, [2, 1])
    assert yields.further(CHAIN) == pytest.approx(0.5, abs=0.03) and yields.further(PLANNED) == pytest.approx(1.5)
    assert (yields.num_steps(CHAIN), yields.num_steps(PLANNED)) == (40, 400)


def test_a_chain_tells_what_shorter_ones_bring() -> None:
    """And where first tokens are right half as often, so are further ones."""
    yields = Yields()
    for number in range(400):
        yields.add_chain(CHAIN_3, [[4, 1], [2, 3]][number % 2])
    rivals = (CHAIN, CHAIN_2, CHAIN_3)
    assert [yields.further(rival) for rival in rivals] == pytest.approx([0.75, 1.25, 1.5], abs=0.02)
    for _ in range(400):
        yields.add_planned(2, 2, 2, 0, 0.0)
    assert [yields.further(rival) for rival in rivals] == pytest.approx([0.375, 0.625, 0.75], abs=0.02)

"""Steps that the library repeats in one call are those that would follow one another, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.backends.playing import SAMPLED, WAYS, Player, new_pair, words
from tests.backends.test_cuts import SAMPLINGS, pair, random_cuts
from tests.backends.test_row_costs import random_costs
from tests.conftest import needs_native

from aquiline.backends.base import Chunk, Decode, Decoded, StepInput, StepOutput
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, NoDraft, Proposal

pytestmark = needs_native

BLOCKS = (1, 4, 2, 7, 3, 8, 5)


def repeat(player: Player, most: int) -> list[StepOutput]:
    """What the next step of all texts gives, repeated."""
    message = player.next_step()
    outputs = [pending.read() for pending in player.backend.repeat(message, most)]
    for number, output in enumerate(outputs):
        player.note(message if number == 0 else StepInput(message.decodes), output)
    return outputs


def seated(sampling: str, seed: int, **settings: Any) -> Player:
    """Texts of every way to draft, some of which cross pages, behind their prompts; chains with a cut among them."""
    player = Player(pair("native"), num_slots=len(WAYS) + 2)
    draws = [random_cuts(10 * seed + i) for i in range(2)]
    for number, way in enumerate(WAYS.values()):
        player.add(words(5 + 3 * number, number), way, SAMPLINGS[sampling], chunk=48, **settings)
    cuts: list[Any] = [draw() for draw in draws]
    for number in range(2):
        player.add(
            words(9, 50 + number), Chain(4), SAMPLINGS[sampling], chunk=48, cut=lambda n=number: cuts[n], **settings
        )
    costs = random_costs(seed)
    player.row_costs = lambda: costs

    def next_block() -> None:
        nonlocal costs
        costs = random_costs(seed + int(sum(len(text.tokens) for text in player.texts)))
        cuts[:] = [draw() for draw in draws]

    player.next_block = next_block  # type: ignore[attr-defined]
    while not all(text.decodes for text in player.texts):
        player.step([text for text in player.texts if not text.decodes])
    return player


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("seed", range(3))
def test_repeated_steps_are_those_that_follow_one_another(sampling: str, seed: int) -> None:
    one, many = (seated(sampling, seed) for _ in range(2))
    for block in BLOCKS:
        for player in (one, many):
            player.next_block()  # type: ignore[attr-defined]
        assert len(repeat(many, block)) == block
        for _ in range(block):
            one.step()
    for a, b in zip(one.texts, many.texts, strict=True):
        assert (a.tokens, a.steps, a.trees) == (b.tokens, b.steps, b.trees)
    for player in (one, many):
        player.step()
    assert [text.tokens for text in one.texts] == [text.tokens for text in many.texts]


def decoded(text_steps: list[Decoded]) -> int:
    return sum(len(step.kept) for step in text_steps)


@pytest.mark.parametrize("way", [NoDraft(), Chain(4)], ids=["plain", "chain"])
def test_the_step_that_draws_an_end_token_is_the_last(way: Any) -> None:
    """Of any of the sequences, at any place of the step's tokens."""
    known = Player(new_pair())
    text = known.add(words(9), way, SAMPLED)
    known.run(12)
    for place in range(1, 12):
        token = text.output[place]
        if token in text.output[:place]:
            continue
        player = Player(new_pair())
        player.add(words(6, 1), NoDraft(), SAMPLED)
        ending = player.add(words(9), way, SAMPLED, end_token_ids=frozenset((token, 95)))
        player.run(1)
        outputs = repeat(player, 30)
        assert token in outputs[-1].decodes[1].kept and ending.output[: place + 1] == text.output[: place + 1]
        assert all(token not in output.decodes[1].kept for output in outputs[:-1])


@pytest.mark.parametrize("way", [NoDraft(), Chain(4)], ids=["plain", "chain"])
@pytest.mark.parametrize("num_output", [0, 3])
def test_the_step_that_reaches_the_limit_is_the_last(way: Any, num_output: int) -> None:
    """Output of an earlier stay counts."""
    player = Player(new_pair())
    player.add(words(6, 1), NoDraft(), SAMPLED)
    limited = player.add(
        words(9), way, SamplingParams(max_tokens=9, seed=1), output=words(num_output, 8), chunk=48,
    )  # fmt: skip
    while not all(text.decodes for text in player.texts):
        player.step([text for text in player.texts if not text.decodes])
    outputs = repeat(player, 30)
    assert len(limited.output) >= 9 > len(limited.output) - len(outputs[-1].decodes[1].kept)


def test_logits_that_are_no_numbers_end_it() -> None:
    player = Player(new_pair())
    text = player.add(words(9), NoDraft(), SAMPLED)
    player.run(1)
    player.backend.kv.v[player.pages[text.slot][0]] = np.nan
    (output,) = (pending.read() for pending in player.backend.repeat(player.next_step(), 5))
    assert output.decodes[0].kept == [-1]


def test_log_probabilities_are_read_step_by_step() -> None:
    player = Player(new_pair())
    player.add(words(9), NoDraft(), SamplingParams(max_tokens=64, seed=0, logprobs=2))
    player.run(1)
    assert len(repeat(player, 5)) == 1
    player.backend.time_parts(True)
    assert len(repeat(player, 5)) == 1


def test_what_cannot_be_repeated_is_refused_and_changes_nothing() -> None:
    player, same = (Player(new_pair(), row_budget=4) for _ in range(2))
    for each in (player, same):
        each.add(words(9), Chain(3), SAMPLED)
        each.run(1)
        each.add(words(30, 1), NoDraft(), SAMPLED, chunk=3)
        each.step([each.texts[1]])
    start = player.texts[1].num_computed
    bad = {
        "num_steps above 1 beside 1 chunks": StepInput(
            (Decode(0, Chain(3)),), (Chunk(1, start, start + 3, False, False),)
        ),
        "decode 0 with a proposal": StepInput((Decode(0, NoDraft(), Proposal((1, 2))),)),
    }
    for message, step in bad.items():
        with pytest.raises(ValueError, match=message):
            player.backend.repeat(step, 2)
    with pytest.raises(ValueError, match="num_steps=0: must be at least 1"):
        player.backend.repeat(StepInput((Decode(0, Chain(3)),)), 0)
    for each in (player, same):
        each.run(20)
    assert [text.tokens for text in player.texts] == [text.tokens for text in same.texts]

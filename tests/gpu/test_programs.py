"""Decode steps as programs: the twin's trees and texts, whatever drafts or runs beside; and replays are steps."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.backends.playing import SAMPLED, WAYS, Player, Text, words
from tests.conftest import tiny_pair, weights_of
from tests.gpu.pairs import (
    MINI,
    MINI_DRAFT,
    backend_of,
    gpu_pair,
    new_gpu,
    new_player,
    new_table,
    told,
    twin_pair,
    weights,
)
from tests.gpu.running import DEVICE

from aquiline.backends.gpu.gpu_pair import GpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.bench.suite.stages import PARTS, RANGES
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Dynamic, NoDraft

GREEDY = SamplingParams(max_tokens=64, seed=0)
TREES = [pytest.param(name, marks=pytest.mark.rare) for name in ("static", "dynamic")]


def decoded(pair: Any, name: str, steps: int, **settings: Any) -> Text:
    """A text after its prompt and some steps."""
    player = new_player(pair)
    text = player.add(words(6, 8), WAYS[name], dataclasses.replace(SAMPLED, seed=8), chunk=6, **settings)
    for _ in range(1 + steps):
        player.step()
    if pair.name == "gpu":
        assert backend_of(player).programs, "no program ran"
    return text


@pytest.mark.parametrize("name", ["none", "chain3", *TREES])
def test_a_step_is_the_twins(name: str) -> None:
    ours, theirs = (decoded(pair, name, 3) for pair in (gpu_pair(), twin_pair()))
    assert told(ours) == told(theirs)
    if name in ("static", "dynamic"):
        moved = [path[-1] >= len(path) for _, _, path in ours.trees]
        assert True in moved[:-1], "a later tree is grown from keys and features that were moved"


@pytest.mark.rare
@pytest.mark.parametrize("name", ["wide", "deep", "flat", "chain1"])
def test_a_step_of_another_tree_is_the_twins(name: str) -> None:
    ours, theirs = (decoded(pair, name, 2) for pair in (gpu_pair(), twin_pair()))
    assert told(ours) == told(theirs)


@pytest.mark.rare
def test_drafting_changes_no_text() -> None:
    """To the bit: where drafts are accepted and where they are not, and whatever the tree."""
    plain = decoded(gpu_pair(), "none", 8).tokens
    for name in ("chain3", "static", "dynamic"):
        tokens = decoded(gpu_pair(), name, 6).tokens
        assert tokens[: len(plain)] == plain[: len(tokens)]


def mixed(player: Player) -> list[Text]:
    """Chains of two lengths, plain decoding, a tree that follows; a prompt in chunks beside decodes; slots that end."""
    first = player.add(words(5, 2), Chain(3), SAMPLED, chunk=5)
    second = player.add(words(9, 3), Chain(1), GREEDY, chunk=6)
    for _ in range(3):
        player.step()
    third = player.add(words(7, 4), NoDraft(), SAMPLED, chunk=4)
    for _ in range(3):
        player.step()
    first.drafting = NoDraft()
    for _ in range(4):
        player.step([first, third])
    first.drafting, second.drafting = Dynamic(), NoDraft()
    player.step()
    return player.texts


@pytest.mark.rare
def test_a_batch_is_the_twins() -> None:
    player = new_player(gpu_pair())
    ours, theirs = mixed(player), mixed(new_player(twin_pair()))
    assert [told(text)[:2] for text in ours] == [told(text)[:2] for text in theirs]
    assert {key.num_decodes for key in backend_of(player).programs} == {1, 2, 4}


@pytest.mark.rare
@pytest.mark.parametrize(
    "draft", [{"norm_feedback": True}, {"fc_norm": True, "norm_before_residual": True}], ids=["fed back", "normed"]
)
def test_drafts_of_other_producers(draft: dict[str, Any]) -> None:
    config = dataclasses.replace(MINI_DRAFT, **draft)
    pairs = new_gpu(MINI, config), TorchPair(*weights(MINI, config), "float32")
    for name in ("chain3", "dynamic"):
        ours, theirs = (decoded(pair, name, 2) for pair in pairs)
        assert told(ours) == told(theirs)


def test_a_trace_has_the_ranges_of_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    player, names = new_player(gpu_pair()), list[str]()

    def noted(name: str) -> Any:
        names.append(name)
        return nullcontext()

    monkeypatch.setattr(torch.cuda.nvtx, "range", noted)
    player.add(words(5, 2), Chain(1), SAMPLED, chunk=5)
    player.step(), player.step()
    [program] = backend_of(player).programs.values()
    with torch.inference_mode():
        program.trace()
    assert {*names} == {*RANGES.values(), *PARTS["EAGLE_DRAFT"], *PARTS["BASE_DECODE_STEP"]} - {"BASE_DECODE_STEP"}
    assert names[0] == "HOST" and names[-1] == "EAGLE_TAIL_COMMIT"


@pytest.mark.rare
@pytest.mark.parametrize("part", ["draft", "target"])
def test_logits_that_are_not_numbers(part: str) -> None:
    """A draft's change no text; of a target's nothing can be drawn, and the outcome says so."""
    decoder, head = tiny_pair(0, MINI, MINI_DRAFT)
    (head.norm if part == "draft" else decoder.final_norm).data[5] = float("nan")
    told_by = []
    for new in (
        lambda *own: GpuPair(*own, "float32", device=str(DEVICE), table=new_table()),
        lambda *own: TorchPair(*own, "float32"),
    ):
        player = new_player(new(*weights_of(decoder, head)))
        text = player.add(words(6, 2), Chain(2), SAMPLED, chunk=6, output=[5])
        player.step(), player.step()
        told_by.append((text.tokens, text.trees))
    assert told_by[0] == told_by[1] and (told_by[0][0][-1] == -1) is (part == "target")


def test_a_program_is_replayed() -> None:
    """What was built for one step runs others: nothing that the host decides, and no address, is inside."""
    player, same = new_player(gpu_pair()), new_player(twin_pair())
    texts = []
    for own in (player, same):
        own.add(words(5, 2), Chain(2), SAMPLED, chunk=5)
        own.step(), own.step()
    [(_, program)] = backend_of(player).programs.items()
    recorded = list(program.launches.each)
    for own in (player, same):
        own.drop(own.texts[0])
        texts.append(own.add(words(11, 7), Chain(2), GREEDY, chunk=11, slot=3))
        own.step(), own.step()
    assert list(backend_of(player).programs.values()) == [program] and program.launches.each == recorded
    assert told(texts[0]) == told(texts[1])

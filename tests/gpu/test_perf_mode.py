"""PERF mode: every rule is broken once, and named; a sound run breaks none."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.backends.playing import SAMPLED, Player, words
from tests.gpu.pairs import backend_of, gpu_pair, new_player

from aquiline.backends.gpu.program import Program
from aquiline.errors import PerfViolation
from aquiline.ops.perf_watch import PerfWatch
from aquiline.ops.triton.tile_table import TileTable
from aquiline.spec.drafting import Chain, NoDraft, Static

TREE = Static(((0,), (0, 0)))


def warmed(way: Any = Chain(1), **settings: Any) -> tuple[Player, PerfWatch]:
    """A player that has decoded, and what watches it from now on."""
    player = new_player(gpu_pair())
    backend_of(player).checks_masks = True
    player.add(words(5, 2), way, chunk=5, **{"sampling": SAMPLED, **settings})
    player.step(), player.step()
    return player, backend_of(player).watch()


def test_a_sound_step_breaks_no_rule() -> None:
    player, watch = warmed()
    player.step()
    assert watch.violations == []


def test_a_step_that_no_program_holds() -> None:
    player, watch = warmed(sampling=dataclasses.replace(SAMPLED, logprobs=1))
    player.step()
    assert watch.violations == ["fallback: log-probabilities of slot 0"]


def test_a_slot_that_may_draft_and_does_not() -> None:
    player, watch = warmed(NoDraft(), drafts=True)
    player.step()
    assert watch.violations == [f"multi-token off: slot 0 with {64 - 2} tokens left"]


def test_the_last_token_needs_no_draft() -> None:
    player, watch = warmed(NoDraft(), drafts=True, sampling=dataclasses.replace(SAMPLED, max_tokens=3))
    player.step()
    assert watch.violations == []


def test_a_program_that_is_built_late() -> None:
    player, watch = warmed()
    player.texts[0].drafting = NoDraft()
    player.step()
    assert [text.partition(" ")[0] for text in watch.violations] == ["multi-token", "compile:"]


def test_a_shape_that_was_not_tuned() -> None:
    player, _ = warmed()
    table = TileTable("this card")
    table.linear(34560, 2880, torch.bfloat16)
    backend = backend_of(player)
    backend._machine.workspace.table = table
    assert backend.watch().violations == ["untuned: linear 34560x2880 bfloat16 on this card"]


@pytest.mark.parametrize("rule", ["host read", "allocation"])
def test_a_host_that_reads_or_allocates(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    player, watch = warmed()
    told = Program.told

    def careless(self: Program) -> Any:
        bool(self.outcome[0, 0]) if rule == "host read" else torch.zeros(3)
        return told(self)

    monkeypatch.setattr(Program, "told", careless)
    player.step()
    assert watch.violations and {text.partition(":")[0] for text in watch.violations} == {rule}


@pytest.mark.parametrize("place", [(1, 1), (2, 1), (2, 2)], ids=str)
def test_a_path_that_is_none(place: tuple[int, int]) -> None:
    """A node whose path names another key than its own, or one that is no ancestor."""
    player, watch = warmed(TREE)
    [program] = backend_of(player).programs.values()
    with torch.inference_mode():
        program.nodes.paths[(0, *place)] += 1 if place[0] == place[1] else 2
    player.step()
    [violation] = watch.violations
    assert violation.startswith("broken mask: 1 rows of a step from roots")


def test_a_strict_watch_raises() -> None:
    player, _ = warmed(sampling=dataclasses.replace(SAMPLED, logprobs=1))
    backend_of(player).watch(is_strict=True)
    with pytest.raises(PerfViolation, match="fallback: log-probabilities of slot 0"):
        player.step()

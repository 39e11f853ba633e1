"""The learner: what a generation reads, that it learns, who judges it, and what a kill or a full disk leaves."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tests.disk import full_after
from tests.train.learning import FAST, serve, told, weights, write_pair, write_store

from aquiline.backends.torch.eagle import save_head
from aquiline.config import PairConfig
from aquiline.engine.learning.store import LearningStore, Served, ServingState
from aquiline.engine.learning.upkeep import forget_learnt
from aquiline.engine.model import ResolvedPair
from aquiline.errors import CheckpointError
from aquiline.models.known_pairs import BUNDLED, PAIRS
from aquiline.train import prepare
from aquiline.train.learner import generation, lesson, replay
from aquiline.train.learner.generation import Learner, paired_interval, what_is_kept
from aquiline.train.learner.lesson import read_lesson
from aquiline.train.learner.replay import read_replay, write_replay
from aquiline.train.simulated_tau import JudgedText
from aquiline.train.start import new_head
from aquiline.train.trainer import Trainer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> PairConfig:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def served(pair: PairConfig) -> list[Served]:
    return serve(pair, 120)


@pytest.fixture
def store(pair: PairConfig, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LearningStore:
    """Served by a draft that has learnt nothing, and learns fast."""
    monkeypatch.setattr(prepare, "default_lr", lambda target: FAST)
    return write_store(tmp_path / "learnt", pair, served)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every generation is accepted, whatever it has learnt in a few steps."""
    monkeypatch.setattr(generation, "paired_interval", lambda before, after: (1.1, 1.2))
    monkeypatch.setattr(generation, "KEPT_OF_OLD", 0.0)
    monkeypatch.setattr(generation, "STEPS", 12)


def learner(store: LearningStore, pair: PairConfig) -> Learner:
    return Learner(store, ResolvedPair.of(pair))


def request(at: int, num_answered: int = 40) -> Served:
    return Served([at] * (10 + num_answered), 10, [12], 0.0)


def test_the_newest_requests_judge_and_old_ones_fall_out(pair: PairConfig, tmp_path: Path) -> None:
    store = write_store(tmp_path / "few", pair, [request(at, 1) for at in range(5)])
    assert not read_lesson(store, (0, 0)).is_enough and not read_lesson(store, (0, 0)).held_out
    requests = [request(at) for at in range(2000)]
    store = write_store(tmp_path / "many", pair, requests)
    found = read_lesson(store, (0, 0))
    num = lesson.WINDOW_TOKENS // 40
    assert found.is_enough and found.num_new == 2000 * 40
    assert [*found.train, *found.held_out] == requests[-num:] and len(found.held_out) == lesson.MOST_TEXTS
    again = read_lesson(store, found.last)
    assert again.num_new == 0 and not again.is_enough and again.train == found.train
    later = write_store(tmp_path / "many", pair, [request(at) for at in range(2000, 2110)])
    assert read_lesson(later, found.last).num_new == 110 * 40 and read_lesson(later, found.last).is_enough


def test_an_interval_is_that_of_paired_texts() -> None:
    before = np.linspace(20, 60, 40)
    assert paired_interval(before, before) == (1.0, 1.0)
    assert paired_interval(before, before / 1.25) == pytest.approx((1.25, 1.25)), "texts differ, their ratios do not"
    noise = np.random.default_rng(1).normal(1, 0.2, 40)
    low, high = paired_interval(before, before / noise)
    assert low < before.sum() / (before / noise).sum() < high and high - low > 0.05


def test_old_skills_are_kept_greedily_and_sampled() -> None:
    texts = [JudgedText(np.zeros(21, np.int32), 10, temperature) for temperature in (0.0, 0.8, 0.0, 0.8)]
    shipped = np.array([2.0, 5.0, 3.0, 5.0])
    assert what_is_kept(texts, shipped, shipped / [2.0, 0.8, 2.0, 0.8]) == pytest.approx((2.0, 1.6)), "sampled"
    assert what_is_kept(texts, shipped, shipped / [0.5, 1.2, 0.5, 1.2]) == pytest.approx((4.0, 2.0)), "greedily"
    assert what_is_kept(texts[::2], shipped[::2], shipped[::2]) == (4.0, 4.0), "where nothing was sampled"


def test_a_known_pair_trains_on_prompts_that_do_not_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in {"NUM_FILES": 1, "FILE_TEXTS": 2, "ANSWER_TOKENS": 8}.items():
        monkeypatch.setattr(replay, name, number)
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(f'{{"question_id": "{i}", "turns": ["def trained_{i}("]}}\n' for i in range(3)))
    monkeypatch.setitem(PAIRS, BUNDLED, replace(PAIRS[BUNDLED], replay=asked))
    store, own = LearningStore(tmp_path / "learnt"), ResolvedPair.of(PairConfig(BUNDLED))
    write_replay(store, own)
    found = read_replay(store)
    beginnings = [tuple(each.tokens[: each.num_prompt]) for each in found.train[:6]]
    assert len(found.train) == 6 + 2 and beginnings[:3] == beginnings[3:] and len(set(beginnings)) == 3
    assert [each.temperature for each in found.train[:6]] == [0.0] * 3 + [0.8] * 3
    judging = {tuple(each.tokens[: each.num_prompt]) for each in found.judged}
    assert len(judging) == 8 and len(found.judged) > 8 and judging.isdisjoint(beginnings)
    (store.folder / "replay" / "trained.json").unlink()
    write_replay(store, own)
    assert read_replay(store) == found, "a folder of an earlier version gets what is missing"


@pytest.mark.rare
def test_a_generation_learns_and_keeps_what_features_were_fused_with(
    store: LearningStore, pair: PairConfig, served: list[Served]
) -> None:
    assert any(each.rejected for each in served)
    found = learner(store, pair).learn(read_lesson(store, (0, 0)))
    assert found is not None and found.accepted and (found.generation, found.parent) == (1, 0)
    assert found.tau_after > 1.05 * found.tau_before and found.interval[0] > 1 and found.old_after > found.old_before
    assert found.tokens == 120 * 48 and store.generations() == [found] and store.has_weights(1)
    shipped, learnt = (load_file(place / "model.safetensors") for place in (Path(str(pair.draft)), store.checkpoint(1)))
    moved = {name for name in learnt if not torch.equal(shipped[name].bfloat16(), learnt[name].bfloat16())}
    assert "fc.weight" not in moved and "d2t" not in moved and "lm_head.weight" in moved and len(moved) > 5
    assert not (store.folder / "unfinished").exists() and told(store) == {"last": [1, 119]}

    store.write_state(ServingState(1))
    second = learner(store, pair).learn(read_lesson(store, (0, 0)))
    assert second is not None and second.parent == 1 and second.tau_before == pytest.approx(found.tau_after, rel=5e-3)
    shipped_tau = pytest.approx(found.old_before, rel=1e-3)
    assert second.old_before == shipped_tau, "the shipped draft's, so that losses do not add up"


def test_the_first_generation_begins_from_the_shipped_draft_as_it_serves(
    pair: PairConfig, served: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights between two steps of int4 would move what is served at once, and lose more of old skills."""
    head = new_head(tiny.target(), torch.arange(32) * 48 // 32, intermediate_size=64)  # a width that int4 can have
    save_head(head, tmp_path / "draft")
    packed, runs = replace(pair, draft=str(tmp_path / "draft"), draft_dtype="int4"), list[Trainer]()
    store = write_store(tmp_path / "packed", packed, served)
    monkeypatch.setattr(Trainer, "train", lambda run: runs.append(run) or {"is_stopped": True})
    assert learner(store, packed).learn(read_lesson(store, (0, 0))) is None
    own = runs[0].weights
    assert own.average is not None and {"head", "layer.o"} < {*own.rounding.linears} and not own.head.fc.requires_grad
    for name, weight, averaged in zip(own.named, own.trained, own.average.weights, strict=True):
        assert torch.equal(weight, averaged), name
        assert name not in own.rounding.linears or torch.equal(weight, own.rounding.of(name, weight)), name


@pytest.mark.rare
def test_a_draft_that_forgets_is_mixed_with_its_parent(
    store: LearningStore, pair: PairConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two looks find that old skills are lost; the third share serves, with its own figures."""
    read, other = read_lesson(store, (0, 0)), LearningStore(shutil.copytree(store.folder, tmp_path / "other"))
    whole = learner(other, pair).learn(read)
    looks = iter([(2.0, 1.9), (2.0, 1.98), (2.0, 1.995)])
    monkeypatch.setattr(generation, "what_is_kept", lambda old, shipped, after: next(looks))
    found = learner(store, pair).learn(read)
    assert found is not None and found.accepted and found.share == generation.SHARES[2] == 0.75
    assert whole is not None and whole.share == 1 and whole.tau_before == found.tau_before
    assert (found.old_before, found.old_after) == (2.0, 1.995) and whole.tau_before < found.tau_after != whole.tau_after
    drafts = (Path(str(pair.draft)), other.checkpoint(1), store.checkpoint(1))
    shipped, trained, mixed = (load_file(draft / "model.safetensors") for draft in drafts)
    assert torch.equal(mixed["fc.weight"].bfloat16(), shipped["fc.weight"].bfloat16())
    name = "lm_head.weight"
    wanted = 0.25 * shipped[name].float() + 0.75 * trained[name].float()
    assert torch.allclose(mixed[name].float(), wanted, rtol=2**-7, atol=1e-4)


@pytest.mark.rare
@pytest.mark.usefixtures("accepted")
def test_the_parent_of_a_mixture_is_the_draft_that_serves(
    store: LearningStore, pair: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the shipped one. A mixture that has nothing of the trained draft is its parent."""
    read = read_lesson(store, (0, 0))
    assert learner(store, pair).learn(read) is not None
    store.write_state(ServingState(1))
    monkeypatch.setattr(generation, "SHARES", (0.0,))
    assert learner(store, pair).learn(read) is not None
    shipped, parent, mixed = (
        load_file(place / "model.safetensors")["lm_head.weight"].bfloat16()
        for place in (Path(str(pair.draft)), store.checkpoint(1), store.checkpoint(2))
    )
    assert torch.equal(mixed, parent) and not torch.equal(parent, shipped)


@pytest.mark.rare
def test_of_a_refused_draft_the_figures_stay(
    store: LearningStore, pair: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "KEPT_OF_OLD", 9.0)
    found = learner(store, pair).learn(read_lesson(store, (0, 0)))
    assert found is not None and found.interval[0] > 1 and not found.accepted and found.share == 1
    assert store.generations() == [found] and [file.name for file in store.checkpoint(1).iterdir()] == ["learning.json"]


@pytest.mark.rare
@pytest.mark.usefixtures("accepted")
def test_the_weights_of_old_generations_go_but_not_those_that_serve(
    store: LearningStore, pair: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "NUM_KEPT", 1)
    own = learner(store, pair)
    for number in (1, 2, 3):
        found = own.learn(read_lesson(store, (0, 0)))
        assert found is not None and found.accepted and found.generation == number
        store.write_state(ServingState(min(2, number)))
    assert [store.has_weights(number) for number in (1, 2, 3)] == [True, True, True], (
        "1 is the parent of 2, which serves"
    )
    store.write_state(ServingState(3))
    assert own.learn(read_lesson(store, (0, 0))) is not None
    assert [store.has_weights(number) for number in (1, 2, 3)] == [False, True, True]
    assert len(store.generations()) == 4


@pytest.mark.rare
def test_what_is_forgotten_meanwhile_teaches_nobody(
    store: LearningStore, pair: PairConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Learner._judge

    def forgotten(self: Learner, attempt: generation.Attempt, trainer: Trainer) -> object:
        found = judge(self, attempt, trainer)
        forget_learnt(store, is_everything=True)
        return found

    monkeypatch.setattr(Learner, "_judge", forgotten)
    assert learner(store, pair).learn(read_lesson(store, (0, 0))) is None
    assert store.generations() == [] and store.segments() == [] and told(store) is None


@pytest.mark.rare
def test_a_draft_that_no_longer_serves_is_not_trained_on(store: LearningStore, pair: PairConfig) -> None:
    own = learner(store, pair)
    read = read_lesson(store, (0, 0))
    write_replay(store, ResolvedPair.of(pair))
    begun = own._begin(read)
    assert own._begun() == begun
    store.write_state(ServingState(7))
    assert own._begun() is None
    store.checkpoint(begun.generation).mkdir()
    assert own._begun() == begun, "killed before it said so; the draft may serve by now"


@pytest.mark.rare
def test_a_full_disk_is_named_and_leaves_everything_else(store: LearningStore, pair: PairConfig) -> None:
    before = {file.name: file.read_bytes() for file in store.segments()}
    own = learner(store, pair)
    with (
        full_after(60_000),
        pytest.raises((OSError, CheckpointError), match=r"learnt/unfinished/.*(cannot be written|full)"),
    ):
        own.learn(read_lesson(store, (0, 0)))
    assert {file.name: file.read_bytes() for file in store.segments()} == before and store.generations() == []
    found = own.learn(read_lesson(store, (0, 0)))
    assert found is not None and found.generation == 1


@pytest.mark.rare
def test_a_process_that_is_killed_goes_on_where_it_was(store: LearningStore, pair: PairConfig, tmp_path: Path) -> None:
    """SIGKILL between a checkpoint of the run and its end; the next process makes the bits of an unbroken one."""
    whole = LearningStore(shutil.copytree(store.folder, tmp_path / "whole"))
    for each, is_killed in ((whole, False), (store, True)):
        command = [sys.executable, str(Path(__file__).with_name("learner_process.py")), str(each.folder)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        for must_die in [True, False] if is_killed else [False]:
            with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE) as process:
                run = each.folder / "unfinished" / "run"
                while must_die and not [step for step in run.glob("step-*") if step.name != "step-0000000"]:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    time.sleep(0.002)
                while not must_die and told(each) is None:
                    assert process.poll() is None, process.stderr and process.stderr.read()
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
            assert each.generations() == [] if must_die else len(each.generations()) == 1
    assert whole.generations() == store.generations() and whole.has_weights(1)
    assert weights(whole.checkpoint(1)) == weights(store.checkpoint(1))

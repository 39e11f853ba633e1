from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from aquiline.models.formats import load_draft
from aquiline.models.load import load_target
from aquiline.train import trainer
from aquiline.train.config import TrainConfig
from aquiline.train.evaluate import continue_prompts, walk
from aquiline.train.optimizer import orthogonalise
from aquiline.train.trainer import train


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("train")
    return TrainConfig(
        target=tiny.write_target(folder / "target"), data=(tiny.write_bin(folder / "train.bin", 60),),
        held_out=(tiny.write_bin(folder / "held.bin", 12, seed=1),), out=folder / "out", capture=tiny.CAPTURE,
        draft_vocab_size=40, context=48, batch_size=4, ttt_steps=4, steps=30, lr=5e-3, log_every=1, eval_every=10,
        eval_rows=8, seed=3,
    )  # fmt: skip


def log_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def test_walking_a_matrix_by_hand() -> None:
    correct = np.array([[1, 0, 1], [1, 1, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 1, 1]], bool)
    # row 0 accepts 1 and commits 2; row 2 accepts 0, commits 1; row 3 accepts 2, commits 3; row 6 accepts 0
    assert walk(correct) == [2, 1, 3, 1]
    assert walk(correct, first=4) == [4]


def test_thirty_steps_lower_the_loss_and_leave_a_draft_that_loads(config: TrainConfig) -> None:
    result = train(config, quiet=True)
    looks = [r for r in log_of(config.out) if r["kind"] == "eval"]
    assert result["held_out_loss"] < looks[0]["held_out_loss"] - 0.1
    assert result["steps"] == 30 and len(result["accuracy"]) == 4
    assert 1 <= result["simulated_tau"] <= 5 and 1 <= result["simulated_tau_sampled"] <= 5
    target = load_target(config.target, capture=tiny.CAPTURE)
    head = load_draft(config.out, target)
    assert head.config.draft_vocab_size == 40 and head.config.capture == tiny.CAPTURE
    newest = load_draft(config.out / "last", target, dtype="float32")
    state = torch.load(config.out / "last" / "training.pt", weights_only=True)
    assert torch.equal(newest.fc, (state["head"]["fc"] * state["scale"]).to(torch.bfloat16).float())


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_repeats_the_unbroken_one(
    config: TrainConfig, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = replace(config, optimizer=optimizer, late_share=0.5, steps=12, eval_every=6, out=config.out / optimizer)
    whole = replace(base, out=base.out / "whole")
    train(whole, quiet=True)
    broken = replace(base, out=base.out / "broken")

    class StopError(Exception):
        pass

    real = trainer.Trainer._step

    def step(self: trainer.Trainer, began: tuple[float, int]) -> None:
        if self.progress.step == 9 and not self.config.resume:
            raise StopError
        real(self, began)

    monkeypatch.setattr(trainer.Trainer, "_step", step)
    with pytest.raises(StopError):
        train(broken, quiet=True)
    train(replace(broken, resume=True), quiet=True)
    states = [torch.load(c.out / "last" / "training.pt", weights_only=True)["head"] for c in (whole, broken)]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name


def test_init_continues_from_a_draft(config: TrainConfig) -> None:
    start = replace(config, out=config.out / "start", steps=4)
    train(start, quiet=True)
    more = replace(config, out=config.out / "more", steps=2, init=start.out / "last", draft_vocab_size=None)
    train(more, quiet=True)
    first = next(r for r in log_of(more.out) if r["kind"] == "eval")
    last = [r for r in log_of(start.out) if r["kind"] == "eval"][-1]
    assert first["held_out_loss"] == pytest.approx(last["held_out_loss"], abs=0.02)
    with pytest.raises(ValueError, match="intermediate_size=8"):
        train(replace(more, intermediate_size=8), quiet=True)


def test_bad_settings_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"context=5.*loss='no'.*steps=0"):
        TrainConfig(Path("t"), (Path("d"),), Path("o"), context=5, loss="no", steps=0)


def test_resume_without_a_run_says_so(config: TrainConfig) -> None:
    with pytest.raises(ValueError, match="does not exist; start without --resume"):
        train(replace(config, out=config.out / "nowhere", resume=True), quiet=True)


def test_continuations_are_what_the_target_says_next() -> None:
    model = tiny.target()
    prompts = torch.randint(0, 48, (3, 6), generator=torch.Generator().manual_seed(0))
    text = continue_prompts(model, prompts, 5, 0.0, 0)
    from tests.dense import DenseAttention

    positions = torch.arange(11).expand(3, -1)
    best = model.logits(model(text, positions, DenseAttention(model.config)).hidden).argmax(-1)
    assert text[:, 6:].equal(best[:, 5:-1])


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((24, 60), (60, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from aquiline.backends.torch.decoder import load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.errors import CheckpointError, NumericalError
from aquiline.models.formats import read_draft_config
from aquiline.train.batches import Assembler, Batch
from aquiline.train.distributed import World
from aquiline.train.losses import LOSSES, Graded, LossRows
from aquiline.train.master_weights import WARMUP_STEPS, orthogonalise, set_rate
from aquiline.train.run_figures import StepFigures, combine
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Budget, Clock, Pace, RunProgress
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train
from aquiline.train.ttt import TTTResult


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch_size", 2.5), ("batch_size", True), ("context", 48.0), ("lr", "0.1"), ("lr", float("inf")),
        ("seed", 1.5), ("weight_decay", -1.0), ("weight_decay", float("nan")), ("minutes", float("inf")),
        ("resume", "no"), ("data", (5,)), ("out", "text"), ("capture", (0, 1.5, 2)),
    ],
)  # fmt: skip
def test_settings_are_of_their_types_and_finite(field: str, value: object, config: TrainConfig) -> None:
    with pytest.raises(ValueError, match=f"{field}=.*must be"):
        replace(config, **{field: value})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny.run_config(tmp_path_factory.mktemp("train"))


def log_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]


def one(config: TrainConfig) -> Trainer:
    return Trainer(config, World(), None, Silent(), Clock())


def test_thirty_steps_lower_the_loss_and_leave_a_draft_that_loads(config: TrainConfig) -> None:
    result = train(config, quiet=True)
    assert result is not None
    looks = [r for r in log_of(config.out) if r["kind"] == "eval"]
    assert [r["step"] for r in looks] == [0, 10, 20, 30]
    assert result["held_out_loss"] < looks[1]["held_out_loss"] - 0.05
    assert result["steps"] == 30 and len(result["accuracy"]) == 4
    assert 1 <= result["simulated_tau"] <= 5 and 1 <= result["simulated_tau_sampled"] <= 5
    target = load_target(config.target, capture=tiny.CAPTURE)
    head = load_draft(config.out, target)
    assert head.config.draft_vocab_size == 40 and head.config.capture == tiny.CAPTURE
    newest = config.out / "step-0000030"
    served = load_draft(newest, target, dtype="float32")
    state = torch.load(newest / "training.pt", weights_only=True)
    assert torch.equal(served.fc, (state["head"]["fc"] * state["scale"]).to(torch.bfloat16).float())
    steps = [r for r in log_of(config.out) if r["kind"] == "step"]
    assert len(steps) == 30 and steps[-1]["tokens"] == result["tokens"]
    assert all(1 <= r["expected_tau"] <= 5 and len(r["conditional"]) == 4 for r in steps)
    assert (config.out / "train.png").stat().st_size > 10_000


@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_never_ships_a_draft_that_is_worse_than_its_start(
    is_new: bool, config: TrainConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """At a rate that breaks any draft, a new one and one that goes on."""
    good = replace(config, out=config.out / f"good-{is_new}", steps=2, eval_every=1)
    base = good if is_new else replace(good, init=good.out, draft_vocab_size=None)
    if not is_new:
        train(good, quiet=True)
    run = replace(base, out=config.out / f"worse-{is_new}", lr=1e3, keep=9)
    result = train(run)
    assert result is not None and result["best_step"] == 0 and result["best_tau"] == result["start_tau"]
    mean = (result["simulated_tau"] + result["simulated_tau_sampled"]) / 2
    assert mean < result["start_tau"], "of the last step, which is not in OUT"
    shipped, start = ((run.out / at / "model.safetensors").read_bytes() for at in (".", "step-0000000"))
    assert shipped == start
    told = capsys.readouterr().err
    assert "the start, saved" in told and "step 0 is better and stays" in told
    assert "holds the draft of the start" in told and "no look found a better one" in told


def test_a_short_run_warms_up_by_its_steps_and_a_long_one_by_its_share() -> None:
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)]
    optimizers[0].param_groups[0]["peak"] = 1.0

    def rates(num_steps: int) -> list[float]:
        return [set_rate(optimizers, step / num_steps, 0.02, step) for step in range(num_steps)]  # type: ignore[arg-type]

    assert [set_rate(optimizers, 0.5, 0.02, step) for step in (0, 4)] == [1 / WARMUP_STEPS, 5 / WARMUP_STEPS]
    assert max(rates(12)) <= 12 / WARMUP_STEPS and rates(12)[0] == 0.01
    long = rates(10_000)
    assert long[:201:50] == pytest.approx([0.01, 0.25, 0.5, 0.75, 1.0]), "as if there were no least number of steps"


def test_what_is_left_follows_from_measured_steps(config: TrainConfig) -> None:
    pace, base = Pace(1, seconds=4.0, tokens=100), replace(config, steps=None)
    begun = RunProgress(step=2, tokens=200, seconds=40.0, prepared_s=30.0)
    for budget, look_s, left in (
        ({"steps": 12}, 0, 10), ({"tokens": 1000}, 0, 8), ({"epochs": 0.5}, 0, 4), ({"minutes": 2.0}, 8, 18),
        ({"minutes": 2.0, "steps": 9}, 8, 7), ({"minutes": 0.5}, 0, 0),
    ):  # fmt: skip
        assert Budget(replace(base, **budget), 12).steps_left(begun, look_s, pace) == left, budget  # type: ignore[arg-type]
    assert Budget(replace(base, minutes=2), 12).share(begun, 8) == 10 / (120 - 8 - 30)


def test_averaged_weights_are_what_is_saved(config: TrainConfig) -> None:
    run = replace(config, out=config.out / "ema", steps=4, ema=0.9)
    train(run, quiet=True)
    state = torch.load(run.out / "step-0000004" / "training.pt", weights_only=True)
    names = list(state["head"])
    average = dict(zip(names, state["average"], strict=True))
    assert not torch.equal(average["norm"], state["head"]["norm"]) and state["average_updates"] == 4
    served = load_draft(run.out / "step-0000004", load_target(config.target, capture=tiny.CAPTURE), dtype="float32")
    assert torch.equal(served.norm, average["norm"].to(torch.bfloat16).float())


def test_init_continues_from_a_draft(config: TrainConfig) -> None:
    start = replace(config, out=config.out / "start", steps=4)
    begun = train(start, quiet=True)
    assert begun is not None
    more = replace(config, out=config.out / "more", steps=1, lr=1e-9, init=start.out, draft_vocab_size=None)
    train(more, quiet=True)
    first = next(r for r in log_of(more.out) if r["kind"] == "eval")
    kept = next(r for r in log_of(start.out) if r["kind"] == "eval" and r["step"] == begun["best_step"])
    assert first["held_out_loss"] == pytest.approx(kept["held_out_loss"], abs=0.005)
    with pytest.raises(ValueError, match="intermediate_size=8"):
        train(replace(more, intermediate_size=8, out=config.out / "other"), quiet=True)


def test_init_keeps_the_layers_its_draft_reads(config: TrainConfig) -> None:
    """Four layers have no default; a draft says which it was trained on."""
    start = replace(config, out=config.out / "others", steps=1, capture=(0, 1, 3))
    train(start, quiet=True)
    more = replace(config, out=config.out / "more-others", steps=1, init=start.out, capture=None, draft_vocab_size=None)
    train(more, quiet=True)
    assert read_draft_config(more.out, config.target).capture == (0, 1, 3)


def test_init_can_be_told_what_its_draft_feeds_back(config: TrainConfig) -> None:
    start = replace(config, out=config.out / "unmarked", steps=1)
    train(start, quiet=True)
    file = start.out / "config.json"
    unmarked = json.loads(file.read_text()) | {"producer": "another", "norm_output": True}
    file.write_text(json.dumps(unmarked))
    more = replace(config, out=config.out / "told", steps=1, init=start.out, draft_vocab_size=None)
    with pytest.raises(CheckpointError, match=r"norm_output=true means two things .*\(--norm-feedback\)"):
        train(more, quiet=True)
    train(replace(more, norm_feedback=True), quiet=True)
    assert read_draft_config(more.out, config.target).norm_feedback
    with pytest.raises(ValueError, match="norm_feedback: says how to read --init"):
        replace(config, norm_feedback=True)


def test_accumulated_batches_give_the_gradients_of_one_large_batch(config: TrainConfig) -> None:
    base = replace(config, late_share=0.5)
    runs = [replace(base, batch_size=8), replace(base, batch_size=2, accumulate=4)]
    whole, parts = (one(replace(run, out=config.out / f"b{run.accumulate}")) for run in runs)
    for step in range(2):
        norms = []
        figures: list[StepFigures] = []
        for t in (whole, parts):
            with tiny.in_float32():
                got, norm = t._gradients()
            figures.append(got)
            norms.append(norm)
        assert figures[0].tokens == figures[1].tokens
        assert figures[0].total == pytest.approx(figures[1].total, rel=1e-6)
        assert figures[0].conditional == pytest.approx(figures[1].conditional, nan_ok=True)
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        for name, parameter in whole.weights.named.items():
            other = parts.weights.named[name]
            assert parameter.grad is not None and other.grad is not None
            assert (parameter.grad - other.grad).norm() <= 1e-5 * parameter.grad.norm(), (step, name)
        for t in (whole, parts):
            t.weights.update()
            t.progress.step += 1


def test_a_poisoned_step_is_skipped_and_ten_in_a_row_end_the_run(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = one(replace(config, out=config.out / "nan", steps=40))
    real, poisoned = Assembler.packed, range(2, 5)

    def packed(self: Assembler, *args: Any) -> Batch:
        batch = real(self, *args)
        if run.progress.step in poisoned:
            batch.target.features[0, 3] = math.nan
        return batch

    monkeypatch.setattr(Assembler, "packed", packed)
    for step in range(6):
        before = {n: p.detach().clone() for n, p in run.weights.named.items()}
        run._step()
        same = all(p.equal(before[n]) for n, p in run.weights.named.items())
        assert same == (step in poisoned), step
    assert run.progress.bad_steps == 0 and run.progress.step == 6
    poisoned = range(6, 40)
    with pytest.raises(NumericalError, match="10 steps in a row"):
        for _ in range(20):
            run._step()
    assert run.progress.step == 15 and all(p.isfinite().all() for p in run.weights.trained)


@pytest.mark.parametrize("what", ["loss", "gradients"])
def test_either_a_loss_or_a_gradient_that_is_no_number_skips_the_step(
    what: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearly always both are broken at once; the one that is broken alone must do."""
    real = LOSSES[config.loss]

    def broken(rows: LossRows) -> Graded:
        value, grad = real(rows)
        if run.progress.step == 1:
            return Graded(value + math.inf, grad) if what == "loss" else Graded(value, grad.mul_(math.inf))
        return Graded(value, grad)

    monkeypatch.setitem(LOSSES, config.loss, broken)
    said: list[str] = []
    monkeypatch.setattr(Silent, "say", lambda self, text: said.append(text))
    run = one(replace(config, out=config.out / what))
    said.clear()
    for step in range(3):
        before = {n: p.detach().clone() for n, p in run.weights.named.items()}
        run._step()
        assert all(p.equal(before[n]) for n, p in run.weights.named.items()) == (step == 1), step
    (skipped,) = (line for line in said if line.endswith("step skipped"))
    assert skipped.startswith("step 2: loss ")


def test_a_budget_ends_with_whatever_is_used_up_first(config: TrainConfig) -> None:
    base = replace(config, steps=None)
    assert Budget(base, 12).share(RunProgress(step=12), 0) == 1
    assert Budget(replace(base, epochs=0.5), 12).share(RunProgress(step=6), 0) == 1
    both = Budget(replace(base, steps=100, tokens=1000), 12)
    assert (
        both.share(RunProgress(step=50, tokens=400), 0) == 0.5
        and both.share(RunProgress(step=50, tokens=900), 0) == 0.9
    )
    minutes = Budget(replace(base, minutes=1), 12)
    assert minutes.share(RunProgress(seconds=20), 20) == 0.5 and minutes.share(RunProgress(seconds=1), 60) == 1


def test_minutes_count_preparation_and_looks(config: TrainConfig) -> None:
    """A clock whose command began 55 s ago leaves five seconds: a look at half time, then an end with room for one."""
    run, clock = replace(config, out=config.out / "minutes", steps=None, minutes=1, eval_every=10**6), Clock()
    clock.began -= 55
    result = Trainer(run, World(), None, Silent(), clock).train()
    assert clock.look_s > 0 and 55 < result["seconds"] < 63
    assert sorted(p.name for p in run.out.glob("step-*"))[-1] == f"step-{result['steps']:07d}"


def test_figures_weigh_every_row_alike_and_expect_what_a_chain_commits() -> None:
    nan = math.nan
    a = TTTResult(torch.tensor(1.0), (2.0, 4.0), (0.5, 0.5), (0.5, 1.0), (4, 2), (4, 1))
    b = TTTResult(torch.tensor(2.0), (5.0, nan), (1.0, nan), (1.0, nan), (2, 0), (2, 0))
    got = combine([a, b], 10, list)
    assert (got.total, got.tokens, got.losses) == (3.0, 10, (3.0, 4.0))
    assert got.accuracy == pytest.approx((4 / 6, 0.5)) and got.conditional == pytest.approx((4 / 6, 1.0))
    assert got.expected_tau == pytest.approx(1 + 4 / 6 + 4 / 6)
    assert combine([b], 5, list).expected_tau == 2.0


def test_bad_settings_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"context=5.*accumulate=0.*steps=0.*loss='no'"):
        TrainConfig(Path("t"), (Path("d"),), Path("o"), context=5, loss="no", steps=0, accumulate=0)
    for name in ("loss", "loss_on", "optimizer"):
        with pytest.raises(ValueError, match=f"{name}=None: must be a text"):
            TrainConfig(Path("t"), (Path("d"),), Path("o"), **{name: None})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"parallel='dp'.*attention='x'.*log='y'"):
        TrainConfig(Path("t"), (Path("d"),), Path("o"), parallel="dp", attention="x", log=("wandb", "y"))


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((24, 60), (60, 24)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.6 and values.max() < 1.3


def test_late_rows_follow_from_seed_and_step(config: TrainConfig) -> None:
    run = one(replace(config, late_share=0.5, out=config.out / "late"))
    first = run._late_rows()
    run.progress.step = 1
    second = run._late_rows()
    run.progress.step = 0
    again = run._late_rows()
    assert first is not None and second is not None and again is not None
    assert first.equal(again) and not first.equal(second) and len(first) == round(0.5 * (48 - 1 - 4))
    assert np.all(np.diff(first.numpy()) > 0)


def test_a_run_does_not_write_over_another(config: TrainConfig) -> None:
    run = replace(config, out=config.out / "twice", steps=1)
    train(run, quiet=True)
    log = (run.out / "train.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"step-0000001; continue it with --resume"):
        train(run, quiet=True)
    assert (run.out / "train.jsonl").read_bytes() == log

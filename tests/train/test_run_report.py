from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from tests.disk import MESSAGE, full_after

from aquiline.train.run_figures import StepFigures, mean_of
from aquiline.train.run_report import Reporter
from aquiline.train.simulated_tau import DraftJudgement

NAN = float("nan")


def report(reporter: Reporter, step: int, done: float) -> None:
    shrink = math.exp(-step / 40)
    accuracy = tuple(0.6 * (1 - shrink) - 0.03 * k for k in range(4))
    figures = StepFigures(2 + 6 * shrink, 500, (1.0, 2.0, 3.0, 4.0), accuracy, (*accuracy[:3], NAN))
    reporter.step(step, figures, done=done, grad_norm=0.3, lr=1e-3, tokens=500 * step, tokens_per_s=640.0)


def judgement(tau: float) -> DraftJudgement:
    return DraftJudgement(9 - 4 * tau, (0.3, 0.2, 0.2, 0.1), tau, tau - 0.1)


def run(reporter: Reporter, first: int, last: int) -> None:
    for step in range(first, last + 1):
        report(reporter, step, step / 100)
        if step % 20 == 0:
            reporter.judged(step, 0.5 * step, 500 * step, judgement(1 + step / 200), step)
    reporter.close()


def records(out: Path) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in map(json.loads, (out / "train.jsonl").read_text().splitlines())]


def test_lines_where_there_is_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(Reporter(tmp_path), 1, 41)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split("ETA")[0].strip() == ("1.0%  step 1 loss 7.852 acc 1/-2/-5/-8% expected tau 1.01 640 tok/s")
    assert lines[0].endswith("ETA -:--")
    assert lines[20].startswith(
        "step 20: held-out loss 4.600, accuracy 30/20/20/10%, simulated tau 1.100 greedy, 1.000"
    )
    assert "(simulated 1.10) 640 tok/s  ETA 0:0" in lines[21]
    capsys.readouterr()
    run(Reporter(tmp_path / "quiet", quiet=True), 1, 2)
    assert capsys.readouterr().err == ""


def test_the_bar_moves_with_every_step_and_says_what_comes_before(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path)
    reporter.stage("loading")
    (task,) = reporter.bar.tasks
    assert task.total is None and task.fields["text"] == "loading"
    report(reporter, 1, 0.01)
    for step in range(1, 20):  # no line of the log
        reporter.advance(step / 100)
        assert (task.total, task.completed) == (1.0, step / 100) and task.fields["text"].startswith("step 1 ")
    reporter.close()


def test_a_resumed_log_drops_what_the_run_does_again(tmp_path: Path) -> None:
    run(Reporter(tmp_path), 1, 30)
    whole = records(tmp_path)
    with (tmp_path / "train.jsonl").open("a") as log:
        log.write('{"kind": "st')
    again = Reporter(tmp_path, after_step=20)
    assert again.tau == 1.1
    run(again, 21, 30)
    assert records(tmp_path) == whole
    last = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[-1])
    assert last["conditional"][3] is None and last["accuracy"][3] is not None


def test_a_full_disk_is_named_and_costs_no_picture_its_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter(tmp_path)
    with full_after(100), pytest.raises(OSError, match=rf"train\.jsonl: {MESSAGE}\. Checkpoints stay.*--resume"):
        report(reporter, 1, 0.01)
    other = Reporter(tmp_path / "other")
    report(other, 1, 0.01)
    with full_after(1000):
        other.close()
    assert "train.png: cannot be written" in capsys.readouterr().err


def test_the_picture_needs_no_look(tmp_path: Path) -> None:
    run(Reporter(tmp_path), 1, 5)
    assert (tmp_path / "train.png").read_bytes()[:4] == b"\x89PNG"


def test_a_single_step_is_seen_in_every_panel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **settings: figures.append(self))
    reporter = Reporter(tmp_path)
    reporter.judged(0, 1.0, 0, judgement(1.2), 0)
    report(reporter, 1, 1.0)
    reporter.close()
    for panel in figures[0].axes:
        single = [line for line in panel.lines if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
        assert len(single) >= 2 and all(line.get_marker() not in ("None", "") for line in single)


def test_tensorboard_gets_every_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(Reporter(tmp_path, log=("tensorboard",), quiet=True), 1, 25)
    run(Reporter(tmp_path, log=("tensorboard",), after_step=20, quiet=True), 21, 30)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    names = "loss accuracy/1 conditional/3 expected_tau lr grad_norm tokens_per_s tokens"
    assert {*(f"train/{name}" for name in names.split()), "held_out/simulated_tau"} <= tags
    assert [e.step for e in events.Scalars("train/loss")] == list(range(1, 31))
    assert events.Scalars("train/loss")[9].value == pytest.approx(2 + 6 * math.exp(-0.25))


def test_wandb_gets_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run(Reporter(tmp_path, log=("wandb",), quiet=True), 1, 20)
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    text = file.read_bytes()
    for name in (b"expected_tau", b"conditional/3", b"simulated_tau_sampled"):
        assert name in text


def test_trackers_get_known_figures_alone(tmp_path: Path) -> None:
    sent: dict[str, float] = {}

    class Kept:
        def log(self, step: int, figures: dict[str, float]) -> None:
            sent.update(figures)

        def close(self) -> None:
            pass

    reporter = Reporter(tmp_path, quiet=True)
    reporter.trackers = [Kept()]  # type: ignore[list-item]
    reporter.judged(0, 1.0, 0, DraftJudgement(2.0, (0.5, NAN), NAN, 1.25), 0)
    reporter.close()
    known = {"held_out_loss": 2.0, "accuracy/1": 0.5, "simulated_tau_sampled": 1.25, "temperature": 0.8}
    assert sent == {f"held_out/{name}": value for name, value in known.items()}


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ValueError, match=rf"log='{name}': .*pip install 'aquiline\[log\]'"):
        Reporter(tmp_path, log=(name,))


def test_a_line_is_the_mean_of_what_its_steps_measured() -> None:
    steps = [
        StepFigures(4.0, 10, (2.0, NAN), (NAN, NAN), (NAN, NAN)),
        StepFigures(2.0, 12, (1.0, 3.0), (0.5, 0.25), (0.5, NAN)),
        StepFigures(3.0, 14, (3.0, 5.0), (0.7, 0.75), (0.7, 0.4)),
    ]
    mean = mean_of(steps)
    assert mean.total == 3.0 and mean.tokens == 36 and mean.losses == (2.0, 4.0)
    assert mean.accuracy == pytest.approx((0.6, 0.5)) and mean.conditional == pytest.approx((0.6, 0.4))

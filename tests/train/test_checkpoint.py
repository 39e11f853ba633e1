from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from aquiline.errors import CheckpointError
from aquiline.train import checkpoint
from aquiline.train.checkpoint import Checkpoints, damage
from aquiline.train.documents import Corpus
from aquiline.train.master_weights import WARMUP_STEPS
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train

RUN = Path(__file__).parent / "train_process.py"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return tiny.run_config(tmp_path_factory.mktemp("checkpoint"))


def write_draft(place: Path) -> None:
    (place / "model.safetensors").write_bytes(os.urandom(20_000))
    (place / "config.json").write_text("{}")


def saved(out: Path, steps: tuple[int, ...], keep: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(out, keep)
    out.mkdir(exist_ok=True)
    for step in steps:
        checkpoints.save(step, write_draft, {"step": step, "weights": torch.full((5000,), float(step))})
    return checkpoints


def names(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir())


def test_the_newest_are_kept_and_the_newest_whole_one_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = saved(tmp_path, (5, 10, 15))
    assert names(tmp_path) == ["step-0000010", "step-0000015"]
    (tmp_path / ".step-0000020.tmp").mkdir()
    assert checkpoints.newest().state["step"] == 15
    newest = tmp_path / "step-0000015" / "training.pt"
    newest.write_bytes(newest.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        found = checkpoints.newest()
    assert found.folder.name == "step-0000010" and "step-0000015 is skipped: training.pt has" in caplog.text
    saved(tmp_path, (12,), keep=1)  # the run went on from step 10; the damaged one is not counted as newer
    assert checkpoints.newest().state["step"] == 12
    saved(tmp_path, (15,))
    assert checkpoints.newest().state["step"] == 15 and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("name", ["training.pt", "model.safetensors", "complete.json"])
def test_a_flipped_or_missing_byte_is_found(tmp_path: Path, name: str) -> None:
    saved(tmp_path, (1,))
    file = tmp_path / "step-0000001" / name
    assert damage(file.parent) is None
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    assert damage(file.parent) is not None
    file.unlink()
    with pytest.raises(CheckpointError, match=r"no whole checkpoint \(step-0000001: .*start without --resume"):
        Checkpoints(tmp_path, 2).newest()


@pytest.mark.parametrize(
    "text", ["[]", "{}x", '{"training.pt": 3}', '{"training.pt": {"bytes": 1}}', "[" * 5000 + "]" * 5000, "\xff"]
)
def test_a_broken_list_of_files_is_damage(text: str, tmp_path: Path) -> None:
    saved(tmp_path, (1,))
    (tmp_path / "step-0000001" / "complete.json").write_text(text, encoding="latin-1")
    assert damage(tmp_path / "step-0000001") == "complete.json is missing or broken"


def test_a_list_of_files_names_files_of_its_folder(tmp_path: Path) -> None:
    saved(tmp_path, (1,))
    manifest = tmp_path / "step-0000001" / "complete.json"
    manifest.write_text(manifest.read_text().replace("training.pt", "../training.pt"))
    assert damage(manifest.parent) == "complete.json is missing or broken"


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = saved(tmp_path, (1, 2))
    before = names(tmp_path)

    def full(state: Any, file: Any) -> None:
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.torch, "save", full)
    with pytest.raises(CheckpointError, match=r"step-0000003: .*disk is full.*step-0000002 is whole.*--resume"):
        checkpoints.save(3, write_draft, {})
    assert names(tmp_path) == before and checkpoints.newest().state["step"] == 2


def test_a_really_full_disk(tmp_path: Path) -> None:
    mounted = tmp_path / "small"
    mounted.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mounted)], capture_output=True
    ).returncode:
        pytest.skip("needs the right to mount")
    try:
        checkpoints = saved(mounted, (1, 2), keep=3)
        for step in range(3, 9):
            try:
                saved(mounted, (step,), keep=8)
            except CheckpointError as error:
                assert "the disk is full" in str(error) and f"step-{step - 1:07d} is whole" in str(error)
                break
        else:
            pytest.fail("256 KB held eight checkpoints of 40 KB")
        assert checkpoints.newest().state["step"] == step - 1 and not list(mounted.glob(".*"))
    finally:
        subprocess.run(["umount", str(mounted)], check=True)


def test_checkpoints_between_looks_follow_the_clock(config: TrainConfig, tmp_path: Path) -> None:
    run = replace(config, out=tmp_path / "out", steps=4, save_every_minutes=1e-9, keep=3, eval_rows=2)
    train(run, quiet=True)
    assert [n for n in names(run.out) if n.startswith("step")] == [f"step-{n:07d}" for n in (2, 3, 4)]
    looks = [x for x in (run.out / "train.jsonl").read_text().splitlines() if '"eval"' in x]
    assert len(looks) == 2, "the start and the end"


def test_a_corpus_is_known_by_everything_that_training_reads() -> None:
    tokens, starts = np.arange(12, dtype=np.int32), np.array([0, 5, 12], np.int64)
    mask, none = np.arange(12) > 3, np.zeros(12, np.bool_)
    corpora = [
        Corpus(tokens, starts, mask, none), Corpus(tokens + 1, starts, mask, none),
        Corpus(tokens, np.array([0, 6, 12], np.int64), mask, none), Corpus(tokens, starts, np.arange(12) > 4, none),
        Corpus(tokens, starts, mask, mask),
    ]  # fmt: skip
    assert len({checkpoint.corpus_digest(corpus) for corpus in corpora}) == len(corpora)
    assert checkpoint.corpus_digest(corpora[0]) == checkpoint.corpus_digest(
        Corpus(tokens.copy(), starts, mask.copy(), none)
    )


def test_every_setting_is_compared_or_free() -> None:
    groups = (*checkpoint.COMPARED, *checkpoint.DERIVED, *checkpoint.BUDGET, *checkpoint.FREE)
    assert sorted(groups) == sorted(f.name for f in fields(TrainConfig))
    assert set(checkpoint.CHANGEABLE) | set(checkpoint.JUDGED_BY) <= {*checkpoint.COMPARED, *checkpoint.DERIVED}


def weights_of(out: Path, step: int) -> dict[str, torch.Tensor]:
    state = torch.load(out / f"step-{step:07d}" / "training.pt", weights_only=True)
    average = state["average"] or []
    return {**state["head"], **{f"average {i}": w for i, w in enumerate(average)}}


@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("muon", marks=pytest.mark.rare)])
def test_a_run_killed_and_resumed_ends_with_the_bits_of_the_unbroken_one(config: TrainConfig, optimizer: str) -> None:
    """A real SIGKILL, somewhere between checkpoints; budgets in steps, tokens and epochs."""
    budget: dict[str, Any] = (
        {"steps": None, "epochs": 2.5} if optimizer == "adamw" else {"steps": None, "tokens": 6_000}
    )
    base = replace(
        config,
        optimizer=optimizer,
        late_share=0.5,
        ema=0.9,
        eval_every=12,
        eval_rows=4,
        out=config.out / optimizer,
        **budget,
    )
    whole = replace(base, out=base.out / "whole")
    result = train(whole, quiet=True)
    assert result is not None and result["steps"] > 30

    broken = replace(base, out=base.out / "broken")
    file = broken.out / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(asdict(broken), default=str))
    log = broken.out / "train.jsonl"
    with subprocess.Popen([sys.executable, str(RUN), str(file)], env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        while not log.exists() or '"step": 20,' not in log.read_text():
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert (broken.out / "step-0000012").is_dir() and not (broken.out / "step-0000024" / "training.pt").exists()

    again = train(replace(broken, resume=True), quiet=True)
    assert again is not None and {k: v for k, v in again.items() if k not in ("draft", "seconds", "tokens_per_s")} == {
        k: v for k, v in result.items() if k not in ("draft", "seconds", "tokens_per_s")
    }
    states = [weights_of(c.out, result["steps"]) for c in (whole, broken)]
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    for name in ("model.safetensors", "config.json"):
        assert (whole.out / name).read_bytes() == (broken.out / name).read_bytes()
    logged = [[json.loads(x) for x in (c.out / "train.jsonl").read_text().splitlines()] for c in (whole, broken)]
    assert [(r["kind"], r["step"]) for r in logged[0]] == [(r["kind"], r["step"]) for r in logged[1]]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_asked_to_stop_saves_what_it_has(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    base = replace(config, steps=6, eval_every=100, eval_rows=2)
    whole = replace(base, out=tmp_path / "whole")
    train(whole, quiet=True)
    step = Trainer._step

    def interrupted(self: Trainer) -> None:
        if self.progress.step == 2:
            signal.raise_signal(number)
        step(self)

    broken, before = replace(base, out=tmp_path / "broken"), signal.getsignal(number)
    monkeypatch.setattr(Trainer, "_step", interrupted)
    result = train(broken, quiet=True)
    assert result is not None and result["is_stopped"] and result["steps"] == 3
    assert (broken.out / "step-0000003").is_dir() and signal.getsignal(number) is before
    monkeypatch.setattr(Trainer, "_step", step)
    again = train(replace(broken, resume=True), quiet=True)
    assert again is not None and not again["is_stopped"]
    states = [weights_of(run.out, 6) for run in (whole, broken)]
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_the_second_signal_ends_a_process_at_once() -> None:
    code = (
        "import signal, time\n"
        "from aquiline.train.schedule import StopRequest\n"
        "with StopRequest('stopping') as stop:\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print(stop.is_made, flush=True)\n"
        "    signal.raise_signal(signal.SIGINT)\n"
        "    print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "True\n", "\nstopping\n")


def test_a_resumed_run_must_be_the_same_run(config: TrainConfig, tmp_path: Path) -> None:
    base = replace(config, out=tmp_path / "out", steps=4, eval_every=4)
    with pytest.raises(CheckpointError, match="it holds none"):
        train(replace(base, resume=True), quiet=True)
    train(base, quiet=True)
    other = tiny.write_bin(tmp_path / "other.bin", 50, seed=9)
    changed = replace(base, resume=True, data=(other,), lr=1e-3, loss="kl", batch_size=3, seed=4)
    with pytest.raises(ValueError) as caught:
        train(changed, quiet=True)
    told = str(caught.value)
    for part in ("data: ", "lr: 0.005 before, 0.001 now", "loss: ce before, kl now", "batch_size: 4 before, 3 now",
                 "seed: 3 before, 4 now", "--init"):  # fmt: skip
        assert part in told
    assert "steps" not in told and "held_out" not in told
    with pytest.raises(ValueError, match="intermediate_size=8"):
        train(replace(base, resume=True, intermediate_size=8), quiet=True)
    with pytest.raises(ValueError, match="may_differ=optimizer"):
        train(replace(base, resume=True, may_differ=("optimizer",)), quiet=True)


def test_a_budget_and_named_settings_may_change(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = replace(config, out=tmp_path / "out", steps=4, eval_every=4)
    train(base, quiet=True)
    longer = replace(
        base, resume=True, steps=8, lr=1e-3, data=(tiny.write_bin(tmp_path / "more.bin", 80, seed=2),),
        may_differ=("data", "lr"), draft_vocab_size=None, capture=None,
    )  # fmt: skip
    result = train(longer)
    told = capsys.readouterr().err
    assert "budget changed (steps: 4 before, 8 now)" in told and "changed: lr: 0.005 before, 0.001 now" in told
    assert result is not None and result["steps"] == 8 and result["draft_vocab_size"] == 40
    rates = [json.loads(x)["lr"] for x in (base.out / "train.jsonl").read_text().splitlines() if '"lr"' in x]
    assert rates[4] == pytest.approx(1e-3 * 5 / WARMUP_STEPS)

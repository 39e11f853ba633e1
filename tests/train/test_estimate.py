from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import tiny
import torch
from tests.checkpoints import write_mxfp4
from torch.utils.flop_counter import FlopCounterMode

from aquiline.backends.torch.decoder import Decoder
from aquiline.cli.train import train as train_command
from aquiline.models.counting import draft_shape_of, shape_of
from aquiline.train import estimate as estimates
from aquiline.train.distributed import World
from aquiline.train.estimate import (
    ProductRate,
    dry_run,
    estimate_run,
    measure_rate,
    pace_lines,
    step_bytes,
    target_shape,
    trained_shape,
)
from aquiline.train.recipes import configure, read_recipe, recipe_names
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock, Pace
from aquiline.train.start import new_head
from aquiline.train.teacher import Teacher
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train

PUBLISHED = {  # millions of parameters of target and draft, from the model cards
    "smollm2-135m": (134.5, None),
    "llama-3.1-8b": (8030, 424.7),
    "qwen3-8b": (8190, None),
    "gpt-oss-20b": (20914, None),
    "gpt-oss-120b": (116829, None),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    """Documents as long as a row, all of whose positions count."""
    folder = tmp_path_factory.mktemp("estimate")
    rows = np.random.default_rng(0).integers(1, 48, (40, 160))
    (folder / "full.jsonl").write_text("\n".join(json.dumps({"input_ids": row.tolist()}) for row in rows))
    return replace(
        tiny.run_config(folder),
        data=(folder / "full.jsonl",),
        draft_vocab_size=48,
        context=160,
        ema=0.9,
        late_share=0.5,
    )


@pytest.fixture(scope="module")
def trainer(config: TrainConfig) -> Trainer:
    return Trainer(config, World(), None, Silent(), Clock())


@pytest.mark.parametrize("flags", [{}, {"qkv_bias": True, "tied_head": True}, {"qk_norm": True}])
def test_a_targets_parameters_are_counted(flags: dict[str, bool]) -> None:
    config = dataclasses.replace(tiny.CONFIG, **flags)  # type: ignore[arg-type]
    counted = sum(p.numel() for p in Decoder(config, tiny.CAPTURE).parameters())
    assert shape_of(config).num_parameters == counted


def test_memory_is_what_a_run_holds(config: TrainConfig, trainer: Trainer) -> None:
    told = estimate_run(config, target_shape(config), World())
    trainer._gradients()
    trainer.weights.update()
    weights = trainer.weights
    assert weights.average is not None
    states = [t for o in weights.optimizers for s in o.state.values() for t in s.values()]
    held = [
        *weights.trained,
        *(p.grad for p in weights.trained if p.grad is not None),
        *states,
        *weights.average.weights,
    ]
    own = [weights.head.embed, trainer.run.assembler.head]
    measured = sum(t.nbytes for t in (*held, *own))
    assert told.memory_bytes["draft and optimizer"] == pytest.approx(measured, rel=1e-3)
    assert trained_shape(config, target_shape(config)).num_parameters == sum(p.numel() for p in weights.trained)


@pytest.mark.parametrize("changes", [{}, {"context": 64, "late_share": 1.0}, {"ttt_steps": 7, "batch_size": 2}])
def test_a_step_keeps_what_was_told(config: TrainConfig, changes: dict[str, Any]) -> None:
    config = replace(config, **changes)
    run = Trainer(config, World(), None, Silent(), Clock())
    parameters = {p.untyped_storage().data_ptr() for p in run.run.head.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in parameters:
            saved[pointer] = tensor  # held, so that no other tensor gets its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run._gradients()
    measured = sum(tensor.untyped_storage().nbytes() for tensor in saved.values())
    shape = target_shape(config)
    told = step_bytes(config, shape, trained_shape(config, shape), World()) - 5 * estimates.CHUNK_BYTES
    assert told == pytest.approx(measured, rel=0.2)


def test_arithmetic_is_what_a_step_multiplies(config: TrainConfig, trainer: Trainer) -> None:
    """Against torch's own counter, which sees the draft alone: the target runs in the engine."""
    counter = FlopCounterMode(display=False)
    with counter:
        figures, _ = trainer._gradients()
    flops = estimate_run(config, target_shape(config), World()).flops_per_token
    told = figures.tokens * (flops["draft layer"] + flops["draft head and loss"])
    assert told == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_disk_is_what_is_written(config: TrainConfig, tmp_path: Path) -> None:
    run = replace(config, out=tmp_path / "out", steps=1, context=64)
    train(run, quiet=True)
    told = estimate_run(run, target_shape(run), World())
    written = sum(f.stat().st_size for f in (run.out / "step-0000001").iterdir())
    assert told.checkpoint_bytes == pytest.approx(written, rel=0.1)
    assert told.features_bytes_per_token == 2 * (len(tiny.CAPTURE) + 1) * tiny.CONFIG.hidden_size + 8


def test_lines_say_how_long_and_whether_it_fits(config: TrainConfig) -> None:
    told = estimate_run(replace(config, steps=None, tokens=3_600_000), target_shape(config), World(0, 2, "cpu", "ddp"))
    rate = ProductRate(sum(told.flops_per_token.values()) * 250, "float32", "here")
    lines = told.lines(keep=2, free=10**12)
    assert "on each of 2 ranks" in lines[0] and "WILL NOT FIT" not in lines[0] and "3 at a time" in lines[2]
    assert "no step was measured. At most 500 tokens/s, so at least 2.0 h for 3,600,000" in told.bound_line(rate)
    assert "IT WILL NOT FIT" in told.lines(keep=2, free=10**6)[0]
    halves = estimate_run(config, target_shape(config), World(0, 2, "cpu", "fsdp"))
    of_nodes = estimate_run(config, target_shape(config), World(0, 4, "cpu", "hsdp", per_node=2))
    assert of_nodes.memory_bytes["draft and optimizer"] == halves.memory_bytes["draft and optimizer"]
    assert halves.memory_bytes["draft and optimizer"] < told.memory_bytes["draft and optimizer"]
    assert estimate_run(replace(config, steps=5), target_shape(config), World()).tokens == 5 * 4 * 160


def test_a_plan_says_what_was_measured_and_what_few_tokens_give() -> None:
    pace = Pace(2, seconds=30.0, tokens=8000)
    measured, few = pace_lines(pace, 12, 8000)
    assert measured == "time: 267 tokens/s, 15.0 s a step, measured over the first 2 steps here"
    assert few.startswith("plan: 12 steps to go, 48,000 tokens, 3.0 min, looks not counted. So few")
    assert "--init smollm2" in few
    assert pace_lines(pace, 12, None)[1].endswith("looks not counted"), "a trained draft that goes on"
    assert pace_lines(pace, 12, 500_000)[1].endswith("looks not counted")


def test_the_rate_is_measured() -> None:
    rate = measure_rate("cpu", 64, seconds=0.01)
    assert 1e6 < rate.flops < 1e15 and rate.dtype in ("float32", "bfloat16")


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_configure_a_run_and_match_what_is_published(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "RATE_SECONDS", 0.0)
    recipe = read_recipe(name)
    config = configure({"batch_size": 3}, recipe, is_dry=True)
    assert config.batch_size == 3 and config.ttt_steps == recipe.settings["ttt_steps"]
    target, draft = PUBLISHED[name]
    assert recipe.shape is not None and recipe.shape.num_parameters / 1e6 == pytest.approx(target, rel=1e-3)
    if draft is not None:
        assert trained_shape(config, recipe.shape).num_parameters / 1e6 == pytest.approx(draft, rel=1e-3)
    lines: list[str] = []
    told = dry_run(config, target_shape(config, recipe), lines.append, None)
    assert told["target"] == recipe.target and told["tokens_per_s"] is None and len(lines) == 4
    assert configure({"data": (Path("d"),), "out": Path("o")}, recipe).target == Path(recipe.target)
    assert name in str(get_type_hints(train_command, include_extras=True)["recipe"].__metadata__[0].help)


def test_a_mixtures_memory_is_what_its_decoder_and_the_library_hold(tmp_path: Path) -> None:
    """MXFP4 experts are float32 in the decoder and stay packed in the library."""
    write_mxfp4(tmp_path, num_hidden_layers=8)
    config = configure({"target": tmp_path, "capture": (1, 3, 4), "context": 64}, None, is_dry=True)
    shape = target_shape(config)
    teacher = Teacher(tmp_path, (1, 3, 4), "cpu", 256)
    assert teacher.models is not None
    held = {p.data_ptr(): p.nbytes for p in (*teacher.decoder.parameters(), teacher.head)}
    assert estimates._decoded(shape).stored_bytes + teacher.head.nbytes == pytest.approx(sum(held.values()), rel=1e-3)
    assert shape.stored_bytes == pytest.approx(teacher.models.weight_bytes, rel=0.1)
    assert (
        estimate_run(config, shape, World()).memory_bytes["target"] > sum(held.values()) + teacher.models.weight_bytes
    )
    head = new_head(teacher.decoder, torch.arange(10))
    assert (head.config.model.experts, head.config.model.intermediate_size) == (None, 4 * 96)
    assert trained_shape(config, shape).body.layers == draft_shape_of(head.config, shape).body.layers


def test_a_recipe_of_ones_own_and_what_is_wrong_in_one(tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("target: ./t\ntrain: {context: 256, capture: [0, 1, 2], features: ./f, log: [wandb]}\n")
    given = {"data": (Path("d"),), "out": Path("o"), "context": 128}
    config = configure(given, read_recipe(str(own)))
    assert (config.context, config.capture, config.features, config.log) == (128, (0, 1, 2), Path("f"), ("wandb",))
    for text, message in (
        ("train: {}", "must name a target"),
        ("target: t\ntrain: {contxt: 3, out: x}", r"train\.contxt, train\.out: known are train\."),
        ("target: t\nconfig: 3", "config must be fields"),
        ("target: t\nconfig: {hidden: 3}", "config: hidden_size"),
        ("target: t\nconfig: {hidden_size: x}", "config: hidden_size='x'"),
        ("target: [", "is not YAML"),
        ("target: t\ntrain: 3", "train must be fields"),
        ("target: " + "[" * 1000 + "]" * 1000, "is not YAML"),
    ):
        own.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_recipe(str(own))
    for name, value in (("capture", "5"), ("capture", "[a]"), ("features", "7"), ("batch_size", "2.5"), ("lr", ".inf")):
        own.write_text(f"target: t\ntrain: {{{name}: {value}}}")
        with pytest.raises(ValueError, match=f"{name}=.*must be"):
            configure(given | {"context": 512}, read_recipe(str(own)))
    with pytest.raises(ValueError, match="recipe='x': must be one of gpt-oss-120b"):
        read_recipe("x")
    with pytest.raises(ValueError, match="no such file"):
        read_recipe(str(tmp_path / "none.yaml"))
    with pytest.raises(ValueError, match="--target and --out: must be given; or name a --recipe"):
        configure({"data": (Path("d"),)}, None)

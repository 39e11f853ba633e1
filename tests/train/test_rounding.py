"""A draft that is trained for the storage it serves in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from aquiline.backends.torch.decoder import load_target
from aquiline.backends.torch.eagle import load_draft
from aquiline.backends.torch.rounding import rounded
from aquiline.ops.quantise import LINEARS
from aquiline.train.distributed import World
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import Trainer, train

STORED = ["int8", "int4"]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return replace(tiny.run_config(tmp_path_factory.mktemp("rounding")), intermediate_size=64)


def one(config: TrainConfig) -> Trainer:
    return Trainer(config, World(), None, Silent(), Clock())


def is_linear(name: str) -> bool:
    return name.rpartition(".")[2] in LINEARS


@pytest.mark.parametrize("dtype", STORED)
def test_a_step_has_the_gradients_of_the_rounded_weights_and_leaves_the_others(dtype: str, config: TrainConfig) -> None:
    rounding, whole = one(replace(config, draft_dtype=dtype)), one(config)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in rounding.weights.named.items():  # no weight is zero, as `o` is at first
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        other = whole.weights.named[name]
        other.data = parameter.data.clone()
        if is_linear(name):
            scale = rounding.run.scale if name == "fc" else torch.ones(parameter.shape[1])
            other.data = rounded(name, (parameter.data * scale).bfloat16(), dtype) / scale
    before = {name: p.detach().clone() for name, p in rounding.weights.named.items()}
    with tiny.in_float32():
        rounding._gradients()
        whole._gradients()
    assert sum(map(is_linear, before)) == 6
    for name, parameter in rounding.weights.named.items():
        other = whole.weights.named[name]
        assert torch.equal(parameter, before[name]), name
        assert is_linear(name) == (not torch.equal(parameter, other)), name
        assert parameter.grad is not None and other.grad is not None and torch.equal(parameter.grad, other.grad), name


@pytest.mark.parametrize("dtype", STORED)
def test_a_draft_is_judged_by_what_its_file_rounds_to(dtype: str, config: TrainConfig) -> None:
    run = replace(config, out=config.out / dtype, steps=6, ema=0.9, draft_dtype=dtype)
    trainer = one(run)
    trainer.train()
    judged = trainer.weights.as_stored(trainer.weights.served())
    saved = load_draft(run.out, load_target(config.target, capture=tiny.CAPTURE), dtype="float32")
    for name, own in judged.named_parameters():
        file = saved.get_parameter(name)
        if not is_linear(name):
            assert torch.equal(own.to(torch.bfloat16).float(), file), name
        elif name == "fc":
            assert torch.allclose(own * trainer.run.scale, rounded(name, file, dtype), rtol=1e-6), name
        else:
            assert torch.equal(own, rounded(name, file, dtype)), name


def test_a_run_that_begins_rounded_serves_what_it_began_from(config: TrainConfig) -> None:
    weights = one(replace(config, draft_dtype="int4", ema=0.9)).weights
    generator = torch.Generator().manual_seed(0)
    for parameter in weights.trained:
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    before, whole = dict(weights.as_stored(weights.head).named_parameters()), weights.head.layer.o.clone()
    weights.round()
    for name, stored in weights.as_stored(weights.served()).named_parameters():
        assert torch.equal(stored, before[name]), name
    assert not torch.equal(weights.head.layer.o, whole)


@pytest.mark.rare
def test_rounding_pays_where_the_draft_is_stored_so(config: TrainConfig) -> None:
    """The same steps with and without, both judged as int4 stores them. After 30 steps which is better is chance."""
    losses = {}
    for dtype in ("bfloat16", "int4"):
        run = replace(config, out=config.out / f"{dtype}-end", draft_dtype=dtype, steps=90)
        train(run, quiet=True)
        stored = replace(
            config, out=config.out / f"{dtype}-judged", init=run.out / "step-0000090", draft_vocab_size=None, steps=1
        )
        result = train(replace(stored, intermediate_size=None, lr=1e-9, draft_dtype="int4"), quiet=True)
        assert result is not None
        losses[dtype] = result["held_out_loss"]
    assert losses["int4"] < losses["bfloat16"]


def test_widths_that_cannot_be_stored_are_refused_before_the_first_step(config: TrainConfig, tmp_path: Path) -> None:
    odd = replace(config, out=tmp_path, intermediate_size=48, draft_dtype="int4")
    with pytest.raises(ValueError, match=r"layer\.down is \[32, 48\]: dtype='int4' needs a width"):
        one(odd)
    with pytest.raises(ValueError, match="draft_dtype='int5': must be one of bfloat16, int8, int4"):
        replace(config, draft_dtype="int5")

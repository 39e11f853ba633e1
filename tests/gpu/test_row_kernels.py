"""Kernels of a row by itself, against the plain torch twin: embedding, norms, activations."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.running import error, int32, poison, randn, run

from aquiline.backends.torch import reference
from aquiline.models.model_config import Activation
from aquiline.ops.triton.activation import activation
from aquiline.ops.triton.embedding import embedding
from aquiline.ops.triton.norm import norm

LIVE = int32([0, -1, 2])
ALIVE, DEAD = [0, 2], [1]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
EPS = 1e-5


@DTYPES
@pytest.mark.parametrize("H", [64, 1040], ids=str)
def test_embedding(H: int, dtype: torch.dtype) -> None:
    weight, out = randn(96, H, dtype=dtype), poison(3, H)
    run(embedding("embed", int32([95, 2**30, 0]), weight, out, LIVE, scale=8.0))
    assert torch.equal(out[ALIVE], 8.0 * weight[[95, 0]].float())
    assert out[DEAD].isnan().all()


@DTYPES
@pytest.mark.parametrize("H", [64, 2880], ids=str)
def test_norm(H: int, dtype: torch.dtype) -> None:
    x, weight, out = randn(3, H, dtype=dtype), randn(H, dtype=dtype, seed=1), poison(3, H)
    run(norm("norm", x, weight, out, LIVE, eps=EPS))
    wanted = reference.rms_norm(x.double(), weight, EPS)
    assert error(out[ALIVE], wanted[ALIVE]) < 1e-6
    assert out[DEAD].isnan().all()


@DTYPES
def test_norm_adds_to_the_residual_and_keeps_the_feature(dtype: torch.dtype) -> None:
    x, stream = randn(3, 64, dtype=dtype), randn(3, 64, dtype=dtype, seed=1)
    weight, own = randn(64, seed=2), randn(64, seed=3)
    residual, features, wide = stream.clone(), poison(3, 192, dtype=dtype), poison(3, 128)
    run(norm(
        "norm", x, weight, wide[:, 64:], LIVE, eps=EPS, residual=residual, own_weight=own, feature=features[:, 64:128]
    ))  # fmt: skip
    total = (stream.float() + reference.rms_norm(x.float(), own, EPS)).to(dtype)
    tolerance = 1e-6 if dtype == torch.float32 else 1e-3
    assert error(residual[ALIVE], total[ALIVE]) < tolerance
    assert torch.equal(features[ALIVE, 64:128], residual[ALIVE])
    assert error(wide[ALIVE, 64:], reference.rms_norm(residual.float(), weight, EPS)[ALIVE]) < 1e-6
    assert torch.equal(residual[DEAD], stream[DEAD])
    for untouched in (features[:, :64], features[:, 128:], features[DEAD], wide[:, :64], wide[DEAD]):
        assert untouched.isnan().all()


def test_a_residual_is_added_to_without_a_norm() -> None:
    x, residual = randn(3, 64), randn(3, 64, seed=1)
    wanted = residual + x
    run(norm("add", x, None, None, int32([0, 1, 2]), eps=EPS, residual=residual))
    assert torch.equal(residual, wanted)
    with pytest.raises(ValueError, match="only one of weight and out"):
        norm("norm", x, randn(64), None, LIVE, eps=EPS)


@DTYPES
@pytest.mark.parametrize("kind", ["swiglu", "geglu", "clamped"])
def test_activation(kind: Activation, dtype: torch.dtype) -> None:
    gate_up, out = 2 * randn(3, 2 * 1040, dtype=dtype), poison(3, 1040)
    run(activation("activation", gate_up, out, LIVE, kind=kind, limit=2.0))
    assert error(out[ALIVE], reference.activate(gate_up.double(), kind, 2.0)[ALIVE]) < 1e-6
    assert out[DEAD].isnan().all()
    with pytest.raises(ValueError, match="kind='relu' is no activation"):
        activation("activation", gate_up, out, LIVE, kind="relu")

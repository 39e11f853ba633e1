from __future__ import annotations

import numpy as np
import pytest
import torch
from native_calls import ISAS, bits, exp_log, gumbel, rms_norm, rope, swiglu

from aquiline.backends.cpu import calls
from aquiline.backends.torch import reference as ref

RNG = np.random.default_rng(0)


def ulps(got, exact):
    """Distance from the exact double in units of the last place of its float32."""
    spacing = np.spacing(np.maximum(np.abs(exact), np.finfo(np.float32).tiny).astype(np.float32)).astype(np.float64)
    return np.abs(got.astype(np.float64) - exact) / spacing


def test_exp_is_accurate(isa):
    x = np.concatenate([RNG.uniform(-87.3, 88.7, 60000), RNG.normal(0, 1e-3, 5000), [0.0, -0.0]]).astype(np.float32)
    exps, _ = exp_log(x)
    assert ulps(exps, np.exp(x.astype(np.float64))).max() <= 2.0
    assert exps[-1] == exps[-2] == 1.0


def test_exp_at_the_ends(isa):
    x = np.array([-np.inf, -1e30, -88.0, 88.73, 1e30, np.inf, np.nan], np.float32)
    exps, _ = exp_log(x)
    assert exps[:3].tolist() == [0.0, 0.0, 0.0]
    assert np.isposinf(exps[3:6]).all() and np.isnan(exps[6])


def test_log_is_accurate(isa):
    x = np.concatenate([np.exp(RNG.uniform(-80, 80, 40000)), 1 + RNG.normal(0, 1e-3, 20000), [1.0]]).astype(np.float32)
    _, logs = exp_log(x)
    assert ulps(logs, np.log(x.astype(np.float64))).max() <= 2.0
    assert logs[-1] == 0.0


def test_swiglu_is_accurate(isa):
    gate, up = (RNG.normal(0, 8, (7, 96)).astype(np.float32) for _ in range(2))
    exact = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    assert ulps(swiglu(gate, up), exact).max() <= 5.0  # exp, a sum, a division and a product
    extreme = np.full((1, 16), -200.0, np.float32)
    assert (swiglu(extreme, np.ones_like(extreme)) == 0).all()


@pytest.mark.parametrize("width", [16, 48, 384, 1040])
def test_rms_norm(width, isa):
    x, weight = RNG.normal(0, 3, (5, width)).astype(np.float32), RNG.normal(1, 0.1, width).astype(np.float32)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    got = rms_norm(x, weight, 1e-5)
    np.testing.assert_allclose(got, exact, rtol=1e-6)
    for row in range(5):
        assert np.array_equal(bits(rms_norm(x[row : row + 1], weight, 1e-5)), bits(got[row : row + 1]))


@pytest.mark.parametrize("dim", [16, 64, 96, 128])
def test_rope_matches_reference(dim, isa):
    """Bit for bit: both round the angle, the double cosine and each product to float32."""
    inv_freq = (500000.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32)
    positions = np.array([0, 1, 63, 4096, 131071, 1_000_003], np.int32)
    x = RNG.normal(0, 1, (len(positions), 3, dim)).astype(np.float32)
    cos, sin = ref.rope_cos_sin(torch.as_tensor(positions), torch.as_tensor(inv_freq), 1.25)
    expected = ref.rope(torch.as_tensor(x), cos, sin).numpy()
    np.testing.assert_allclose(rope(x, positions, inv_freq, 1.25), expected, rtol=0, atol=1e-6)


def test_gumbel_matches_reference(isa):
    for seed, position in ((0, 0), (2**64 - 1, 2**31 - 1), (123456789012345, 77)):
        expected = ref.gumbel(seed, position, torch.arange(50001)).numpy()
        np.testing.assert_allclose(gumbel(seed, position, 50001), expected, rtol=3e-6, atol=3e-7)


def test_every_isa_has_the_same_bits():
    x = RNG.normal(0, 20, 20000).astype(np.float32)
    gate, up = x[:9600].reshape(50, 192), x[9600:19200].reshape(50, 192)
    inv_freq = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    heads, positions = x[: 100 * 2 * 64].reshape(100, 2, 64), np.arange(100, dtype=np.int32) * 997
    results = []
    for isa in ISAS:
        calls.select_isa(isa)
        norm = rms_norm(gate, up[0], 1e-6)
        results.append(
            [*exp_log(x), swiglu(gate, up), norm, rope(heads, positions, inv_freq, 1.0), gumbel(5, 6, 10007)]
        )
    for isa, result in zip(ISAS, results, strict=True):
        for i, (got, expected) in enumerate(zip(result, results[0], strict=True)):
            assert np.array_equal(bits(got), bits(expected)), (isa, i)

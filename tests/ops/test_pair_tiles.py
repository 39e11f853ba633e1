"""The fourth arithmetic, bfloat16 products over tile registers: the rule to the bit, over real registers where the CPU
has AMX, and over their twin, to which the best and the plainest of the other instruction sets leave it too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_calls import ISAS, bits, native_linear
from test_linear import SHAPES, inputs

from aquiline.backends.cpu import calls

SOME_ISAS = [isa for isa in ISAS if isa.startswith("amx") or isa in ("portable", "avx512_vnni", "neon_dot")]
ROWS = 70  # alone, tiles of up to 16 rows in one register, of up to 32 in two, and several


@pytest.fixture(params=SOME_ISAS)
def isa(request):
    calls.select_isa(request.param)
    return request.param


def floats(bfloat16):
    """A tensor as float64, which holds every product of two bfloat16 and every sum of few of them."""
    return torch.as_tensor(bfloat16).bfloat16().double().numpy()


def expected_of(weight, x, bias):
    """csrc/formats/bfloat16_tiles.h, a product after the other."""
    x, weight = floats(x), floats(weight)
    sums = np.zeros((len(x), len(weight)), np.float32)
    for start in range(0, x.shape[1], 32):
        parts = np.zeros((2, *sums.shape), np.float32)
        for k in range(start, min(start + 32, x.shape[1])):
            products = x[:, k, None] * weight[None, :, k]
            parts[k % 2] = (products + parts[k % 2]).astype(np.float32)
        sums = sums + (parts[0] + parts[1])
    return sums if bias is None else sums + bias.numpy()


def quantised_inputs(n, k, rows):
    """Numbers of eight bits within a factor of 2^8, whose products and sums float64 holds exactly."""
    rng = np.random.default_rng(n * k)
    scaled = lambda *shape: rng.integers(-255, 256, shape) * np.exp2(rng.integers(-8, 1, shape))  # noqa: E731
    return (
        torch.as_tensor(scaled(n, k)).bfloat16(),
        scaled(rows, k).astype(np.float32),
        torch.as_tensor(scaled(n)).float(),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_instruction_set_is_the_rule_to_the_bit(shape, isa):
    weight, x, bias = quantised_inputs(*shape, ROWS)
    expected, linear = expected_of(weight, x, bias), native_linear(weight, bias, "bfloat16_tiles")
    for threads in (1, 3):
        calls.set_threads(threads)
        for rows in {1, 2, 15, 16, 17, 32, 33, ROWS}:
            assert np.array_equal(bits(linear(x[:rows])), bits(expected[:rows])), (threads, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_double_over_rounded_inputs(shape):
    weight, x, bias = inputs(*shape, 13, torch.bfloat16)
    exact = floats(x) @ floats(weight).T + bias.double().numpy()
    bound = (np.abs(floats(x)) @ np.abs(floats(weight)).T + np.abs(bias.numpy())) * shape[1] * 2**-23 + 1e-7
    assert (np.abs(native_linear(weight, bias, "bfloat16_tiles")(x) - exact) <= bound).all()


@pytest.mark.parametrize("exponents", [(-70, -60), (-127, 0), (0, -127)], ids=str)
def test_what_is_subnormal_is_nothing(exponents, isa):
    """Products, sums and inputs about the smallest normal number: alone, beside others, and by the twin."""
    rng = np.random.default_rng(5)
    weight, x = (rng.standard_normal(shape) * 2.0**e for shape, e in zip(((48, 96), (20, 96)), exponents, strict=True))
    linear = native_linear(torch.as_tensor(weight).bfloat16(), None, "bfloat16_tiles")
    got = linear(x.astype(np.float32))
    assert not np.any((got != 0) & (np.abs(got) < 2.0**-126))
    assert np.array_equal(bits(got[:1]), bits(linear(x[:1].astype(np.float32))))
    calls.select_isa("amx_twin")
    assert np.array_equal(bits(got), bits(linear(x.astype(np.float32))))


def test_a_row_that_is_not_finite_stays_alone(isa):
    weight, x, _ = quantised_inputs(40, 96, 20)
    linear = native_linear(weight, None, "bfloat16_tiles")
    expected, x[9, 40] = linear(x), np.nan
    got = linear(x)
    assert np.isnan(got[9]).all() and np.array_equal(bits(np.delete(got, 9, 0)), bits(np.delete(expected, 9, 0)))
    assert "amx_twin" in ISAS

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_calls import ISAS, bits, native_linear

from aquiline.backends.cpu import calls

# n: one block, a partial block, odd block counts, several panels. k: one unroll step up to several cache lines.
SHAPES = [(16, 16), (1, 32), (17, 48), (48, 64), (100, 128), (144, 96), (336, 160)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(n, k, rows, dtype):
    generator = torch.Generator().manual_seed(n * 1000 + k)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return weight, torch.randn(rows, k, generator=generator).numpy(), torch.randn(n, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_double(shape, dtype, isa):
    weight, x, bias = inputs(*shape, 13, dtype)
    exact = torch.as_tensor(x).double() @ weight.double().T
    bound = (torch.as_tensor(x).double().abs() @ weight.double().abs().T + bias.abs()) * shape[1] * 2**-24 + 1e-7
    for offset, used in ((0.0, None), (bias.double(), bias)):
        y = native_linear(weight, used)(x)
        assert ((torch.as_tensor(y).double() - exact - offset).abs() <= bound).all(), (shape, dtype, isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_rows_threads_or_isa(shape, dtype):
    weight, x, bias = inputs(*shape, 64, dtype)
    linear = native_linear(weight, bias)
    expected = bits(linear(x))
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            for rows in range(1, 65) if threads == 2 or isa == ISAS[0] else (1, 7, 64):
                got = bits(linear(x[:rows]))
                assert np.array_equal(got, expected[:rows]), (shape, dtype, isa, threads, rows)


def test_sums_run_in_k_order():
    """One chain of fused multiply-adds: 2^24 + 1 - 2^24 loses the 1 in order, and would not if halves were added."""
    weight = torch.ones(1, 16)
    x = np.zeros((1, 16), np.float32)
    x[0, [0, 1, 8]] = 2.0**24, 1.0, -(2.0**24)
    assert native_linear(weight)(x)[0, 0] == 0.0
    x[0, [0, 1, 8]] = 2.0**24, -(2.0**24), 1.0
    assert native_linear(weight)(x)[0, 0] == 1.0


def test_every_half_precision_number_is_read_as_it_is():
    """All 65,536 as weights, infinities and subnormal numbers among them; NaNs too have the same bits everywhere."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    weight = torch.zeros(2**16, 16, dtype=torch.float16)
    weight[:, 0] = halves
    x, found = np.eye(1, 16, dtype=np.float32), {}
    for isa in ISAS:
        calls.select_isa(isa)
        found[isa] = native_linear(weight)(x)[0]
        assert np.array_equal(found[isa], halves.float().numpy(), equal_nan=True), isa
        assert np.array_equal(bits(found[isa]), bits(found[ISAS[0]])), isa


def test_no_rows():
    assert native_linear(torch.ones(16, 16))(np.empty((0, 16), np.float32)).shape == (0, 16)

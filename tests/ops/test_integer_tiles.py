"""Linears over tile registers, real ones where the CPU has AMX and their twin everywhere: the rule to the bit, whether
rows are too few for the registers, fill one, two, or several tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import WIDTHS, Groups, groups_of, random_blocks
from integers import linear
from native_calls import ISAS, bits, native_linear
from test_blocks import grouped, inputs

from aquiline.backends.cpu import calls
from aquiline.blocks import BLOCK_TYPES

TILED = [isa for isa in ISAS if isa.startswith("amx")]
ROWS = range(1, 41)  # tiles of 12, 16, 17 and 32 rows, of which two registers share the last, and of 16 + 17


@pytest.fixture(params=TILED)
def tiled(request):
    calls.select_isa(request.param)
    return request.param


def check_all_rows(native, x, expected, which):
    for rows in ROWS:
        assert np.array_equal(bits(native(x[:rows])), bits(expected[:rows])), (which, rows)


def test_the_twin_is_there():
    assert "amx_twin" in TILED


@pytest.mark.parametrize("kind", BLOCK_TYPES)
@pytest.mark.parametrize("n, blocks", [(16, 1), (33, 3), (100, 2)])
def test_blocks_are_the_rule_to_the_bit(kind, n, blocks, tiled):
    k = WIDTHS[kind] * blocks
    weight, x = random_blocks(kind, n, k), inputs(max(ROWS), k)
    expected = linear(x, groups_of(weight))
    for threads in (1, 2):
        calls.set_threads(threads)
        check_all_rows(native_linear(weight, arithmetic="int8"), x, expected, threads)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_our_own_codes_are_the_rule_to_the_bit(dtype, tiled):
    n, k = 100, 160
    weight, x = torch.randn(n, k, generator=torch.Generator().manual_seed(3)), inputs(max(ROWS), k)
    groups = grouped(weight, dtype)
    if dtype == "int8":
        groups, scales = Groups(groups.codes, np.ones((n, k // 32), np.float32), None), groups.scales[:, 0]
    expected = linear(x, groups) * (scales if dtype == "int8" else np.float32(1))
    check_all_rows(native_linear(weight, arithmetic="int8", dtype=dtype), x, expected, dtype)


def test_signed_inputs_meet_unsigned_codes(tiled):
    """Codes of -128 and 127, stored as 0 and 255, against inputs of one size and either sign."""
    weight, k = random_blocks("Q8_0", 16, 64), 64
    blocks = weight.values.reshape(16, 2, 34)
    blocks[:8, :, 2:], blocks[8:, :, 2:] = 128, 127
    x = np.full((max(ROWS), k), 5.0, np.float32)
    x[::2] *= -1
    check_all_rows(native_linear(weight, arithmetic="int8"), x, linear(x, groups_of(weight)), "Q8_0")


@pytest.mark.parametrize("row", [0, 9, 16, 17, 31, 39])
def test_a_row_that_is_not_finite_stays_alone(row, tiled):
    weight, x = random_blocks("Q4_1", 40, 96), inputs(max(ROWS), 96)
    native = native_linear(weight, arithmetic="int8")
    expected, x[row, 40] = native(x), np.nan
    got = native(x)
    assert np.isnan(got[row]).all()
    assert np.array_equal(bits(np.delete(got, row, 0)), bits(np.delete(expected, row, 0)))

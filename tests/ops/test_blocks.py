"""Linears over GGUF's packed blocks: the values of gguf-py, and both arithmetics to the bit on every path."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blocks import WIDTHS, Groups, groups_of, random_blocks
from integers import linear, rounded
from native_calls import ISAS, bits, native_linear

from aquiline.backends.cpu import calls
from aquiline.blocks import BLOCK_TYPES
from aquiline.ops.quantise import quantise
from aquiline.ops.torch_arrays import array_of, tensor_of

# n: one block, a partial block, an odd count of blocks, several panels. k in blocks of the type.
SHAPES = [(16, 1), (1, 2), (33, 3), (100, 5)]
CASES = [(kind, n, WIDTHS[kind] * blocks) for kind in BLOCK_TYPES for n, blocks in SHAPES]


def inputs(rows: int, k: int, seed: int = 1) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 1, (rows, k)).astype(np.float32)
    x[:, ::7] *= 30  # as hidden states have: a few channels are far larger than the others
    return x


def grouped(weight: torch.Tensor, dtype: str) -> Groups:
    """int8 and int4 as groups; int8's one scale per output is one that every group shares."""
    quantised = quantise("weight", array_of(weight), dtype)
    return Groups(quantised.codes.astype(np.int64), quantised.scales.astype(np.float32), None)


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_the_oracle_reads_what_gguf_py_reads(kind):
    weight = random_blocks(kind, 9, 2 * WIDTHS[kind])
    assert np.array_equal(bits(groups_of(weight).values()), bits(weight.dequantised()))


@pytest.mark.parametrize("kind, n, k", CASES, ids=str)
def test_float32_arithmetic_is_that_of_the_unpacked_weight(kind, n, k, isa):
    weight, x = random_blocks(kind, n, k), inputs(13, k)
    expected = native_linear(tensor_of(weight.dequantised()))(x)
    assert np.array_equal(bits(native_linear(weight)(x)), bits(expected))


@pytest.mark.parametrize("kind, n, k", CASES, ids=str)
def test_integer_arithmetic_is_the_rule_to_the_bit(kind, n, k):
    weight, x = random_blocks(kind, n, k), inputs(17, k)
    expected, bias = linear(x, groups_of(weight)), torch.linspace(-1, 1, n)
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            native = native_linear(weight, arithmetic="int8")
            for rows in (1, 2, 3, 4, 5, 6, 7, 8, 17):
                assert np.array_equal(bits(native(x[:rows])), bits(expected[:rows])), (isa, threads, rows)
    with_bias = native_linear(weight, bias, arithmetic="int8")(x)
    assert np.array_equal(bits(with_bias), bits(expected + bias.numpy()))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("n, k", [(16, 32), (33, 96), (100, 160)])
def test_our_own_codes_in_integer_arithmetic(dtype, n, k, isa):
    weight, x = torch.randn(n, k, generator=torch.Generator().manual_seed(3)), inputs(11, k)
    groups = grouped(weight, dtype)
    if dtype == "int4":
        expected = linear(x, groups)
    else:
        ones = Groups(groups.codes, np.ones((n, k // 32), np.float32), None)
        expected = linear(x, ones) * groups.scales[:, 0]
    native = native_linear(weight, arithmetic="int8", dtype=dtype)
    assert np.array_equal(bits(native(x)), bits(expected))


def test_extreme_codes_do_not_saturate(isa):
    """Codes of -128 and 127 against inputs of one size: unsigned, the sum of two products passes 16 bits."""
    weight, k = random_blocks("Q8_0", 16, 64), 64
    blocks = weight.values.reshape(16, 2, 34)
    blocks[:8, :, 2:], blocks[8:, :, 2:] = 128, 127
    for sign in (1, -1):
        x = np.full((3, k), 5.0 * sign, np.float32)
        native = native_linear(weight, arithmetic="int8")
        assert np.array_equal(bits(native(x)), bits(linear(x, groups_of(weight))))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_reaches_every_output_of_its_row(value, isa):
    weight, x = random_blocks("Q4_1", 40, 96), inputs(5, 96)
    native = native_linear(weight, arithmetic="int8")
    expected, x[2, 40] = native(x), value
    got = native(x)
    assert np.isnan(got[2]).all()
    assert np.array_equal(bits(np.delete(got, 2, 0)), bits(np.delete(expected, 2, 0)))


def test_inputs_too_small_to_scale_are_zero(isa):
    weight = random_blocks("Q4_1", 40, 64)
    x = np.full((1, 64), 2.0**-121, np.float32)
    x[0, 32:] = 2.0**-119
    codes, scales = rounded(x)
    assert scales[0, 0] == 0 and (codes[0, :32] == 0).all() and (codes[0, 32:] == 127).all()
    native = native_linear(weight, arithmetic="int8")
    assert np.array_equal(bits(native(x)), bits(linear(x, groups_of(weight))))
    assert not native(np.zeros((1, 64), np.float32)).any()


def test_ties_go_to_even(isa):
    x = np.zeros((1, 32), np.float32)
    x[0, :5] = 127, 0.5, 1.5, 2.5, -2.5
    assert rounded(x)[0][0, :5].tolist() == [127, 0, 2, 2, -2]
    weight = random_blocks("Q8_0", 16, 32)
    native = native_linear(weight, arithmetic="int8")
    assert np.array_equal(bits(native(x)), bits(linear(x, groups_of(weight))))


def test_rounded_twice_or_in_another_arithmetic_is_refused():
    weight = random_blocks("Q4_0", 16, 32)
    with pytest.raises(ValueError, match="dtype='int8': weight is in Q4_0 blocks, which are not rounded again"):
        native_linear(weight, dtype="int8")
    with pytest.raises(ValueError, match="arithmetic='bfloat16': weight is in Q4_0 blocks; use 'int8' or 'float32'"):
        native_linear(weight, arithmetic="bfloat16")


def test_other_weights_are_multiplied_in_float32_beside_it():
    x, weight = inputs(3, 48), torch.randn(16, 48, generator=torch.Generator().manual_seed(1))
    for dtype in (None, "int8"):
        found = native_linear(weight, arithmetic="int8", dtype=dtype)(x)
        assert np.array_equal(bits(found), bits(native_linear(weight, dtype=dtype)(x)))

"""int8 and int4 linears: how weights are rounded, one result per row whatever stands beside it, and what is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest
import torch
from native_calls import ISAS, LOADED, at, bits, native_linear
from test_forward import HIDDEN, TOKENS, chunk_rows, new_kv, random_weights, reference_forward, run
from test_linear import inputs

from aquiline.backends.cpu import buffers, calls, native
from aquiline.backends.cpu.native import AqLinear
from aquiline.backends.torch.rounding import rounded
from aquiline.blocks import in_memory
from aquiline.errors import NativeError
from aquiline.ops.quantise import GROUP, quantise, stored_bytes
from aquiline.ops.torch_arrays import array_of

# n: one block, a partial block, odd block counts, several panels. k: one group up to more than the prefetch runs ahead.
SHAPES = [(16, 32), (1, 64), (17, 96), (48, 64), (100, 128), (144, 320), (336, 160)]
CASES = [(dtype, shape) for dtype in ("int8", "int4") for shape in SHAPES] + [("int8", (16, 16)), ("int8", (33, 48))]


def exact(weight, dtype):
    """The weight that the codes stand for, in float64."""
    quantised = quantise("weight", array_of(weight), dtype)
    n, num_groups = quantised.scales.shape
    codes = quantised.codes.reshape(n, num_groups, -1).astype(np.float64)
    return torch.from_numpy((codes * quantised.scales.astype(np.float64)[..., None]).reshape(n, -1))


@pytest.mark.parametrize("dtype, shape", CASES, ids=str)
def test_matches_double_over_the_dequantised_weight(dtype, shape, isa):
    weight, x, bias = inputs(*shape, 13, torch.bfloat16)
    rounded, x64 = exact(weight, dtype), torch.as_tensor(x).double()
    bound = (x64.abs() @ rounded.abs().T + bias.abs()) * shape[1] * 2**-24 + 1e-7
    for offset, used in ((0.0, None), (bias.double(), bias)):
        y = native_linear(weight, used, dtype=dtype)(x)
        assert ((torch.as_tensor(y).double() - x64 @ rounded.T - offset).abs() <= bound).all(), (shape, dtype, isa)


@pytest.mark.parametrize("dtype, shape", CASES, ids=str)
def test_bits_do_not_depend_on_rows_threads_or_isa(dtype, shape):
    weight, x, bias = inputs(*shape, 64, torch.bfloat16)
    linear = native_linear(weight, bias, dtype=dtype)
    expected = bits(linear(x))
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            for rows in range(1, 65) if threads < 3 and (isa != "portable" or threads == 2) else (1, 7, 64):
                got = bits(linear(x[:rows]))
                assert np.array_equal(got, expected[:rows]), (shape, dtype, isa, threads, rows)


def test_int8_sums_codes_in_k_order_and_scales_once(isa):
    """Weights of 1 beside a 127 that no input meets: codes of 1 under a scale of 1."""
    weight = torch.ones(1, 16)
    weight[0, 15] = 127
    x = np.zeros((1, 16), np.float32)
    x[0, [0, 1, 8]] = 2.0**24, 1.0, -(2.0**24)
    assert native_linear(weight, dtype="int8")(x)[0, 0] == 0.0
    x[0, [0, 1, 8]] = 2.0**24, -(2.0**24), 1.0
    assert native_linear(weight, dtype="int8")(x)[0, 0] == 1.0
    # Whole inputs: the sum over codes is exact, so one product and one sum are all the rounding there is.
    weight, _, bias = inputs(40, 96, 1, torch.float32)
    whole, quantised = np.arange(-48, 48, dtype=np.float32)[None], quantise("weight", array_of(weight), "int8")
    scaled = (whole @ quantised.codes.astype(np.float32).T) * quantised.scales[:, 0]
    assert np.array_equal(bits(native_linear(weight, bias, dtype="int8")(whole)), bits(scaled + bias.numpy()))


def test_int4_sums_groups_in_order_and_each_from_zero(isa):
    weight = torch.ones(1, 3 * GROUP)
    weight[0, GROUP - 1 :: GROUP] = -8  # a scale of 1
    linear = native_linear(weight, dtype="int4")
    x = np.zeros((1, 3 * GROUP), np.float32)
    for first, second, third, expected in (
        ((2.0**24, 0.0), (1.0, 1.0), (-(2.0**24), 0.0), 2.0),  # one chain over k would lose both ones
        ((2.0**24, 1.0), (-(2.0**24), 0.0), (0.0, 0.0), 0.0),  # within a group, k order
        ((2.0**24, 0.0), (1.0, 0.0), (-(2.0**24), 0.0), 0.0),  # groups in order
        ((2.0**24, 0.0), (-(2.0**24), 0.0), (1.0, 0.0), 1.0),
    ):
        x[0, [0, 1, GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 1]] = *first, *second, *third
        assert linear(x)[0, 0] == expected, (first, second, third)


@pytest.mark.parametrize("dtype, limit, share", [("int8", 127, 1 / 127), ("int4", 8, 1 / 8)])
def test_rounding_errors_are_bounded(dtype, limit, share):
    for seed, spread in ((0, 0.02), (1, 1.0), (2, 3e30), (3, 1e-30)):
        generator = torch.Generator().manual_seed(seed)
        weight = (spread * torch.randn(70, 192, generator=generator)).bfloat16()
        groups = weight.double().view(70, -1, 192 if dtype == "int8" else GROUP)
        largest = groups.abs().amax(-1, keepdim=True)
        error = (exact(weight, dtype).view_as(groups) - groups).abs()
        # Half a step, of a scale that is itself rounded; in int4 the side that has no eighth code may lose a whole one.
        step = share * largest * (1 + 2**-8)
        assert (error <= step * (0.5 if dtype == "int8" else 1.0)).all()
        is_inside = groups.abs() <= (limit - 1) * step / (1 + 2**-7)
        assert (error[is_inside] <= (step * 0.5).expand_as(groups)[is_inside]).all() and is_inside.float().mean() > 0.9
        whole = quantise("weight", array_of(weight), dtype).dequantised()
        assert np.array_equal(whole, exact(weight, dtype).float())
        assert np.array_equal(bits(whole), bits(rounded("weight", weight, dtype).numpy())), "the twin in torch differs"


def test_ties_go_to_even_and_extremes_to_the_ends():
    row = torch.zeros(1, 32)
    row[0, :6] = torch.tensor([127, 0.5, 1.5, 2.5, -0.5, -1.5])
    quantised = quantise("weight", array_of(row), "int8")
    assert quantised.scales.item() == 1 and quantised.codes[0, :6].tolist() == [127, 0, 2, 2, 0, -2]
    for sign in (1, -1):
        row[0, :6] = sign * torch.tensor([-8, 0.5, 1.5, 2.5, 7.5, 7.75])
        quantised = quantise("weight", array_of(row), "int4")
        assert quantised.scales.item() == sign and quantised.codes[0, :6].tolist() == [-8, 0, 2, 2, 7, 7]
    assert not quantised.codes[0, 6:].any()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-37, 3e38, -3e38])
def test_zero_tiny_and_huge_rows(dtype, value):
    weight = torch.full((16, 32), value)
    weight[1] = 1.0
    y = native_linear(weight, dtype=dtype)(np.ones((1, 32), np.float32) / 32)[0]
    assert np.isfinite(y).all() and abs(y[1] - 1) < 1e-6
    assert np.allclose(y[[0, 15]], value, rtol=0.01, atol=1e-43)


def test_bytes_of_a_weight():
    weight = torch.zeros(64, 128)
    for dtype, per_weight in (("int8", 1 + 4 / 128), ("int4", 0.5625)):
        linear = native_linear(weight, dtype=dtype)
        assert linear.num_bytes == stored_bytes((64, 128), dtype) == 64 * 128 * per_weight


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_chunks_of_a_large_weight_are_rounded_alike(dtype):
    weight = np.random.default_rng(0).standard_normal((40, 65536), np.float32)
    whole = quantise("weight", weight, dtype)
    for row in (0, 15, 16, 39):
        alone = quantise("weight", weight[row : row + 1], dtype)
        assert np.array_equal(alone.codes[0], whole.codes[row]) and np.array_equal(alone.scales[0], whole.scales[row])


def dequantised(weights, dtype):
    def as_stored(weight):
        return (in_memory(quantise("weight", weight[0].values, dtype).dequantised()),)

    def block(of, *names):
        return replace(of, **{name: as_stored(getattr(of, name)) for name in names})

    layers = tuple(
        replace(la, attention=block(la.attention, "qkv", "o"), mlp=block(la.mlp, "gate_up", "down"))
        for la in weights.layers
    )
    return replace(weights, layers=layers, head=as_stored(weights.head))


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "draft"])
def test_a_forward_is_that_of_the_dequantised_weights(dtype, is_draft, isa):
    w = random_weights(torch.bfloat16, 1 if is_draft else 3, draft=is_draft, extras=not is_draft)
    g = torch.randn(20, HIDDEN, generator=torch.Generator().manual_seed(1)) if is_draft else None
    kv, table = new_kv(w, dtype=torch.float32)
    model = calls.NativeModel(w, dtype=dtype)
    hidden, _ = run(model, kv, chunk_rows(table, TOKENS, 0, 20), g=None if g is None else g.numpy())
    paths, kv_dtype = [list(range(i + 1)) for i in range(20)], torch.float32
    expected, _ = reference_forward(dequantised(w, dtype), TOKENS[:20], np.arange(20), paths, g, kv_dtype)
    np.testing.assert_allclose(hidden, expected, atol=2e-5 * float(expected.abs().max()))
    plain, _ = reference_forward(w, TOKENS[:20], np.arange(20), paths, g, kv_dtype)
    assert np.abs(hidden - plain.numpy()).max() > 1e-3, "this test would pass without quantisation"


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("is_draft", [False, True], ids=["target", "draft"])
def test_forward_bits_do_not_depend_on_chunks_threads_or_isa(dtype, is_draft):
    w = random_weights(layers=1 if is_draft else 3, draft=is_draft, extras=not is_draft)
    model = calls.NativeModel(w, dtype=dtype)
    g = np.random.default_rng(0).normal(0, 1, (140, HIDDEN)).astype(np.float32) if is_draft else None
    expected = None
    index = np.arange(140, dtype=np.int32)
    for isa, threads, sizes in (
        (ISAS[0], 1, [140]),
        (ISAS[0], 2, [1] * 140),
        (ISAS[len(ISAS) // 2], 3, [64, 7, 69]),
        (ISAS[-1], 2, [17, 123]),
    ):
        calls.select_isa(isa)
        calls.set_threads(threads)
        kv, table = new_kv(w)
        starts = np.cumsum([0, *sizes[:-1]])
        parts = []
        for s, n in zip(starts, sizes, strict=True):
            own = None if g is None else g[s : s + n].copy()
            parts.append(run(model, kv, chunk_rows(table, TOKENS, s, n), g=own)[0])
        hidden = np.concatenate(parts)
        got = np.concatenate((bits(hidden), bits(model.logits(hidden, index))), axis=1)
        expected = got if expected is None else expected
        assert np.array_equal(got, expected), (isa, threads, sizes)


def test_what_cannot_be_quantised_is_named():
    weight = np.zeros((16, 48), np.float32)
    with pytest.raises(ValueError, match=r"down is \[16, 48\]: dtype='int4'.*multiple of 32; use 'int8'"):
        quantise("down", weight, "int4")
    with pytest.raises(ValueError, match="dtype='int5'"):
        quantise("down", weight, "int5")
    with pytest.raises(ValueError, match="dtype='float32'"):
        calls.NativeLinear(weight, dtype="float32")
    for value in (np.inf, -np.inf, np.nan):
        weight[7, 5] = value
        with pytest.raises(ValueError, match="down holds values that are not finite"):
            quantise("down", weight, "int8")
    with pytest.raises(ValueError, match="weight is int8, it needs weights stored in bfloat16"):
        native_linear(torch.zeros(16, 32).bfloat16(), None, "bfloat16", "int8")
    with pytest.raises(ValueError, match="multiple of 16"):
        native_linear(torch.zeros(16, 24), dtype="int8")
    with pytest.raises(ValueError, match="float64"):
        native_linear(torch.zeros(16, 32).double(), dtype="int8")


def test_the_library_refuses_what_it_cannot_pack_or_read():
    codes, scales = np.zeros((16, 64), np.int8), np.ones(64, np.float32)
    packed = np.full(1 << 14, 7, np.uint8)

    def refused(message, *arguments):
        with pytest.raises(NativeError, match=message):
            LOADED.pack(*arguments)
        assert (packed == 7).all()

    refused("weight is NULL", None, at(scales), 16, 64, native.INT8, at(packed))
    for dtype in (native.INT8, native.INT4):
        refused("scales is NULL", at(codes), None, 16, 64, dtype, at(packed))
        refused("scales is not aligned", at(codes), at(scales) + 1, 16, 64, dtype, at(packed))
        refused("packed is not aligned to 4", at(codes), at(scales), 16, 64, dtype, at(packed) + 2)
        refused("k=40: must be a positive multiple of 16", at(codes), at(scales), 16, 40, dtype, at(packed))
        refused("n=0", at(codes), at(scales), 0, 64, dtype, at(packed))
    refused("k=48: must be a multiple of 32 in int4", at(codes), at(scales), 16, 48, native.INT4, at(packed))
    refused(r"packed.dtype=31: must be one of 0 \(float32\)", at(codes), at(scales), 16, 64, 31, at(packed))
    for code in (-9, 8):
        codes[3, 2] = code
        refused(rf"weight\[194\]={code}: must be in \[-8, 7\]", at(codes), at(scales), 16, 64, native.INT4, at(packed))
    x, y = np.zeros((1, 64), np.float32), np.zeros((1, 16), np.float32)
    for linear, message in (
        (AqLinear(None, None, 16, 64, native.INT8), "weight is NULL"),
        (AqLinear(at(packed) + 2, None, 16, 64, native.INT4), "weight is not aligned"),
        (AqLinear(at(packed), at(scales) + 1, 16, 64, native.INT8), "weight is not aligned"),
        (AqLinear(at(packed), None, 16, 48, native.INT4), "k=48: must be a multiple of 32"),
        (AqLinear(at(packed), None, 16, 64, 31), "weight.dtype=31"),
    ):
        with pytest.raises(NativeError, match=message):
            LOADED.linear(ctypes.byref(linear), at(x), 1, at(y))


def test_keys_values_and_embeddings_are_never_quantised():
    w = random_weights()
    kv, table = new_kv(w)
    model = calls.NativeModel(w, dtype="int8")
    model.struct.embed_dtype = native.INT8
    with pytest.raises(NativeError, match="embed_dtype=3"):
        run(model, kv, chunk_rows(table, TOKENS, 0, 2))
    described = buffers.describe_kv(kv)
    described.dtype = native.INT4
    with pytest.raises(NativeError, match=r"kv\.dtype=4"):
        LOADED.move_kv(ctypes.byref(described), at(table), table.shape[1], at(table), at(table), at(table), 0)

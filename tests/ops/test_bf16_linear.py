"""The second arithmetic, bfloat16 dot products, and the fourth, over tile registers (test_pair_tiles.py has its rule):
their own numbers, and one result per row whatever stands beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_calls import ISAS, LOADED, bits, native_linear
from test_forward import HIDDEN, TOKENS, chunk_rows, new_kv, random_weights, run
from test_linear import SHAPES, inputs

from aquiline.backends.cpu import calls, native_weights
from aquiline.errors import NativeError

needs_dot = pytest.mark.skipif(LOADED is None or not LOADED.has_bf16_dot(), reason="this CPU has no AVX512_BF16")


@needs_dot
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_double_over_rounded_inputs(shape):
    weight, x, bias = inputs(*shape, 13, torch.bfloat16)
    rounded = torch.as_tensor(x).bfloat16().double()
    exact = rounded @ weight.double().T + bias.double()
    bound = (rounded.abs() @ weight.double().abs().T + bias.abs()) * shape[1] * 2**-23 + 1e-7
    y = native_linear(weight, bias, "bfloat16")(x)
    assert ((torch.as_tensor(y).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("arithmetic", [pytest.param("bfloat16", marks=needs_dot), "bfloat16_tiles"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_rows_or_threads(shape, arithmetic):
    weight, x, bias = inputs(*shape, 64, torch.bfloat16)
    linear = native_linear(weight, bias, arithmetic)
    expected = bits(linear(x))
    for threads in (1, 2, 3):
        calls.set_threads(threads)
        for rows in range(1, 65):
            assert np.array_equal(bits(linear(x[:rows])), expected[:rows]), (shape, threads, rows)


@pytest.mark.parametrize("arithmetic", [pytest.param("bfloat16", marks=needs_dot), "bfloat16_tiles"])
def test_rounds_to_nearest_even_and_keeps_what_is_no_number(arithmetic, isa):
    weight = torch.zeros(16, 16, dtype=torch.bfloat16)
    weight[:, 3] = 1
    x = np.zeros((6, 16), np.float32)
    x[:, 3] = [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, np.inf, -(2.0**100), np.nan]
    y = native_linear(weight, None, arithmetic)(x)[:, 0]
    assert y[:3].tolist() == [1, 1 + 2**-6, 1 + 2**-7] and y[4] == torch.tensor(-(2.0**100)).bfloat16()
    assert not np.isfinite(y[[3, 5]]).any()


@pytest.mark.parametrize("arithmetic", [pytest.param("bfloat16", marks=needs_dot), "bfloat16_tiles"])
@pytest.mark.parametrize("is_draft", [False, True])
def test_forward_does_not_depend_on_chunks_threads_or_isa(is_draft, arithmetic):
    w = random_weights(extras=not is_draft, draft=is_draft, layers=1 if is_draft else 3)
    w = replace(w, norm_before_residual=is_draft)
    model, exact = calls.NativeModel(w, arithmetic), calls.NativeModel(w)
    g = np.random.default_rng(0).normal(0, 1, (140, HIDDEN)).astype(np.float32) if is_draft else None
    expected = None
    for isa, threads, sizes in ((ISAS[0], 1, [140]), (ISAS[0], 2, [1] * 140), (ISAS[0], 3, [64, 7, 69]),
                                (ISAS[-1], 2, [17, 123])):  # fmt: skip
        calls.select_isa(isa)
        calls.set_threads(threads)
        kv, table = new_kv(w)
        starts = np.cumsum([0, *sizes[:-1]])
        parts = []
        for s, n in zip(starts, sizes, strict=True):
            own = None if g is None else g[s : s + n].copy()
            parts.append(run(model, kv, chunk_rows(table, TOKENS, s, n), g=own)[0])
        got = np.concatenate(parts)
        expected = got if expected is None else expected
        assert np.array_equal(bits(got), bits(expected)), (isa, threads, sizes)
    kv, table = new_kv(w)
    float32, _ = run(exact, kv, chunk_rows(table, TOKENS, 0, 140), g=g)
    difference = np.abs(float32 - expected).max() / np.abs(float32).max()
    assert 0 < difference < 0.05
    assert np.array_equal(np.isnan(model.logits(expected, np.arange(4, dtype=np.int32))), np.zeros((4, 203), bool))


def test_what_it_needs_is_named(monkeypatch):
    weight = torch.zeros(16, 16)
    with pytest.raises(ValueError, match="arithmetic='float16'"):
        native_linear(weight, None, "float16")
    with pytest.raises(ValueError, match="weights stored in bfloat16"):
        native_linear(weight, None, "bfloat16")
    monkeypatch.setattr(native_weights, "has_bf16_dot", lambda: False)
    with pytest.raises(NativeError, match=r"AVX512_BF16.*use 'float32'"):
        native_linear(weight.bfloat16(), None, "bfloat16")

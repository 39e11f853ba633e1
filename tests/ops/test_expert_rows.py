"""A mixture of experts: the reference's numbers, and the same bits of a row whatever rows and threads are beside it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from blocks import random_blocks
from native_calls import bits, parts
from test_forward import (
    CONFIG,
    FFN,
    HIDDEN,
    TOKENS,
    check_same_bits,
    chunk_rows,
    new_kv,
    random_weights,
    reference_forward,
    run,
)

from aquiline.backends.cpu import calls
from aquiline.blocks import in_memory
from aquiline.models.model_config import Experts
from aquiline.models.model_weights import MoeWeights
from aquiline.ops.torch_arrays import array_of

GPT_OSS = Experts(count=8, per_token=4, has_bias=True)
QWEN = Experts(count=19, per_token=3)
ALONE = Experts(count=5, per_token=5, over_all=True)
MANY = Experts(count=40, per_token=16, over_all=True)
ALL = {"gpt-oss": GPT_OSS, "qwen": QWEN, "every": ALONE, "many": MANY}


def with_experts(experts, dtype=torch.float32, kind=None, extras=True, layers=3):
    """Random weights whose layers have experts, of floats or of blocks of a type."""
    generator = torch.Generator().manual_seed(experts.count)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

    def each(n, k, seed):
        if kind is None:
            return tuple(in_memory(array_of(random(n, k, scale=3.0))) for _ in range(experts.count))
        return tuple(random_blocks(kind, n, k, seed * 100 + e) for e in range(experts.count))

    def mlp(index):
        biases = [array_of(random(experts.count, n, scale=4.0)) for n in (2 * FFN, HIDDEN)]
        router_bias = array_of(random(1, experts.count)[0])
        biases = [router_bias, *biases] if experts.has_bias else [None] * 3
        router = parts(random(experts.count, HIDDEN, scale=2.0))
        return MoeWeights(router, each(2 * FFN, HIDDEN, index), each(HIDDEN, FFN, 50 + index), *biases)

    w = random_weights(dtype, layers, extras=extras)
    found = tuple(replace(layer, mlp=mlp(i)) for i, layer in enumerate(w.layers))
    clamped = {"activation": "clamped", "activation_limit": 7.0} if experts is GPT_OSS else {}
    return replace(w, config=replace(CONFIG, num_layers=layers, experts=experts, **clamped), layers=found)


@pytest.mark.parametrize("experts", ALL.values(), ids=ALL)
def test_target_matches_reference(experts, isa):
    w = with_experts(experts)
    kv, table = new_kv(w, dtype=torch.float32)
    num = 100 if isa != "portable" else 12
    hidden, captured = run(calls.NativeModel(w), kv, chunk_rows(table, TOKENS, 0, num), features=2)
    seen = [list(range(i + 1)) for i in range(num)]
    expected, features = reference_forward(w, TOKENS[:num], np.arange(num), seen, kv_dtype=torch.float32)
    np.testing.assert_allclose(hidden, expected, atol=3e-5 * float(expected.abs().max()))
    np.testing.assert_allclose(captured, features, atol=3e-5 * float(features.abs().max()))


@pytest.mark.parametrize("kind", ["MXFP4", "Q8_0", "Q4_0"])
def test_blocks_in_float32_arithmetic_are_their_values(kind, isa):
    """Equal to the bit: a block is unpacked, and then multiplied as floats are."""
    w = with_experts(GPT_OSS, kind=kind)
    unpacked = tuple(
        replace(layer, mlp=replace(layer.mlp, **{
            name: tuple(in_memory(weight.dequantised()) for weight in getattr(layer.mlp, name))
            for name in ("gate_up", "down")
        }))
        for layer in w.layers
    )  # fmt: skip
    results = []
    for weights in (w, replace(w, layers=unpacked)):
        kv, table = new_kv(w, dtype=torch.float32)
        results.append(run(calls.NativeModel(weights), kv, chunk_rows(table, TOKENS, 0, 20))[0])
    assert np.array_equal(bits(results[0]), bits(results[1]))


SETTINGS = {
    "float32": (None, torch.float32, "float32", None), "bfloat16": (None, torch.bfloat16, "float32", None),
    "int8": (None, torch.bfloat16, "int8", "int8"), "mxfp4": ("MXFP4", torch.bfloat16, "float32", None),
    "mxfp4_dot": ("MXFP4", torch.bfloat16, "int8", None), "mxfp4, int8": ("MXFP4", torch.bfloat16, "int8", "int8"),
}  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("experts", [GPT_OSS, MANY], ids=["gpt-oss", "many"])
def test_bits_do_not_depend_on_chunks_threads_or_isa(experts, setting):
    kind, dtype, arithmetic, quantised = setting
    w = with_experts(experts, dtype, kind)
    check_same_bits(calls.NativeModel(w, arithmetic, quantised), w)


def test_equal_logits_choose_the_lowest_ids(isa):
    """A router of zeros: every row uses the first experts, and only these are counted."""
    w = with_experts(GPT_OSS)
    flat = tuple(
        replace(layer, mlp=replace(
            layer.mlp, router=parts(torch.zeros(8, HIDDEN)), router_bias=np.zeros(8, np.float32),
            gate_up=tuple(weight if e < 4 else in_memory(np.full((2 * FFN, HIDDEN), np.nan, np.float32))
                          for e, weight in enumerate(layer.mlp.gate_up)),
        ))
        for layer in w.layers
    )  # fmt: skip
    kv, table = new_kv(w, dtype=torch.float32)
    rows = chunk_rows(table, TOKENS, 0, 9)
    hidden = np.empty((9, HIDDEN), np.float32)
    assert calls.NativeModel(replace(w, layers=flat)).forward(kv, rows, hidden) == 4 * len(flat)
    assert np.isfinite(hidden).all()


def test_a_row_that_is_not_finite_stays_so_and_alone(isa):
    w = with_experts(GPT_OSS)
    embed = w.embed[0].values.copy()
    embed[TOKENS[5]] = np.nan
    kv, table = new_kv(w, dtype=torch.float32)
    rows = chunk_rows(table, TOKENS, 0, 6)
    hidden, _ = run(calls.NativeModel(replace(w, embed=(in_memory(embed),))), kv, rows)
    clean, table = new_kv(w, dtype=torch.float32)
    expected, _ = run(calls.NativeModel(w), clean, chunk_rows(table, TOKENS, 0, 6))
    assert np.isnan(hidden[5]).all() and np.array_equal(bits(hidden[:5]), bits(expected[:5]))


def test_experts_are_counted_once_a_step(isa):
    """One row of one layer reads per_token experts; all rows together at most all of them."""
    w = replace(with_experts(GPT_OSS, layers=1), capture=())
    model = calls.NativeModel(w)
    for num in (1, 2, 60):
        kv, table = new_kv(w, dtype=torch.float32)
        rows = chunk_rows(table, TOKENS, 0, num)
        found = model.forward(kv, rows, np.empty((num, HIDDEN), np.float32))
        assert found == 4 if num == 1 else 4 <= found <= min(8, 4 * num)
    assert found == 8

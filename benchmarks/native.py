"""How close the native CPU library comes to what the machine can do. Run: python benchmarks/native.py [--threads N].

One decoded token reads every weight once, so a linear of few rows is bound by memory: its time should be its bytes
over the read bandwidth, measured first, and stay flat as rows are added until arithmetic takes over (what verifying a
draft costs). int8 and int4 read a half and 0.28 of what bfloat16 does; they and GGUF's blocks are multiplied as
integers too. Weights are rotated among copies larger than the caches. Attention at length is bound by the bytes of the
keys and values in the same way. Figures hold for the machine and the minute they were taken in.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from gguf import GGMLQuantizationType, quants

from aquiline.backends.cpu import buffers, calls, native, native_weights
from aquiline.backends.cpu.native_pages import new_pages
from aquiline.blocks import BLOCK_TYPES, FLOATS, Array, Parts, in_memory
from aquiline.models.model_config import ModelConfig, RopeConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights
from aquiline.ops.quantise import QUANTISED
from aquiline.types import (
    SAMPLING,
    KVGroup,
    Rows,
    RowSampling,
    storage_dtype,
)

ROW_COUNTS = (1, 2, 4, 6, 8, 16, 32, 64)
CACHE_BYTES = 160 << 20  # what the rotated copies must exceed


def quick_seconds(runs: Sequence[Callable[[], object]], budget_s: float = 0.4) -> float:
    """The tenth percentile of single calls over rounds of `runs`: other processes only ever add time, and short calls
    fit between their time slices."""
    times: list[float] = []
    for run in runs:
        run()
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline or len(times) < 10:
        for run in runs:
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return float(np.quantile(times, 0.1))


def read_bandwidth() -> float:
    """GB/s of one row of float32 times 128 MB of weights, an estimate of the ceiling."""
    linear = calls.NativeLinear(np.ones((32 << 10, 1 << 10), np.float32))
    return linear.num_bytes / quick_seconds([partial(linear, np.ones((1, 1 << 10), np.float32))], 2.0) / 1e9


def new_linear(n: int, k: int, dtype: str, arithmetic: str) -> calls.NativeLinear:
    """A linear of random weights: of floats, quantised, or a type of GGUF's blocks."""
    weight = np.random.default_rng(0).standard_normal((n, k), np.float32)
    if dtype in BLOCK_TYPES:
        blocks = quants.quantize(weight, GGMLQuantizationType[dtype])
        return calls.NativeLinear(in_memory(blocks, dtype), arithmetic=arithmetic)
    quantised = dtype if dtype in QUANTISED else None
    return calls.NativeLinear(weight.astype(storage_dtype(dtype)), arithmetic=arithmetic, dtype=quantised)


def bench_linear(n: int, k: int, dtype: str, arithmetic: str) -> dict[str, dict[str, float]]:
    """GB/s, GFLOP/s and microseconds of one linear stored as `dtype`, weights from memory."""
    linears = [new_linear(n, k, dtype, arithmetic)]
    num_bytes = linears[0].num_bytes
    linears += [new_linear(n, k, dtype, arithmetic) for _ in range(max(1, CACHE_BYTES // num_bytes))]
    results = {}
    for rows in ROW_COUNTS:
        x = np.random.default_rng(0).standard_normal((rows, k), np.float32)
        seconds = quick_seconds([partial(linear, x) for linear in linears])
        flops = 2.0 * rows * n * k / seconds / 1e9
        results[str(rows)] = {"us": seconds * 1e6, "gb_s": num_bytes / seconds / 1e9, "gflop_s": flops}
        print(f"  m={rows:3d}  {seconds * 1e6:8.1f} us  {num_bytes / seconds / 1e9:6.1f} GB/s  {flops:7.1f} GFLOP/s")
    return results


def random_model(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelWeights:
    """A target of 64-wide heads with random bf16 weights."""
    dim, generator = 64, np.random.default_rng(0)
    config = ModelConfig(
        family="llama", vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=dim, max_positions=1 << 17, rms_norm_eps=1e-6, rope=RopeConfig(),
        tied_head=True,
    )  # fmt: skip

    def weight(*shape: int) -> Parts:
        values = generator.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        return (in_memory(values.astype(FLOATS["bfloat16"])),)

    def layer() -> LayerWeights:
        attention = AttentionWeights(weight((heads + 2 * kv_heads) * dim, hidden), weight(hidden, heads * dim))
        mlp = DenseWeights(weight(2 * ffn, hidden), weight(hidden, ffn))
        return LayerWeights(attention, mlp, input_norm=ones, post_norm=ones)

    embed, ones = weight(vocab, hidden), np.ones(hidden, np.float32)
    return ModelWeights(config, embed, tuple(layer() for _ in range(layers)), ones, embed)


def new_kv(weights: ModelWeights, length: int, page_size: int = 64) -> tuple[KVGroup, np.ndarray]:
    """Pages for one slot of `length` keys, filled with small random values, and its table."""
    pages = -(-length // page_size) + 1
    layers, heads, dim = len(weights.layers), weights.config.num_kv_heads, weights.config.head_dim
    v = random_values(pages, layers, heads, page_size, dim)
    keys = v.copy().reshape(pages, layers, heads, page_size // 16, dim, 16)
    return KVGroup(keys, v), np.arange(pages, dtype=np.int32)[None]


def random_values(*shape: int) -> Array:
    """Normal numbers in bfloat16."""
    return np.random.default_rng(1).standard_normal(shape, np.float32).astype(FLOATS["bfloat16"])


def keys_in_codes(num_pages: int, layers: int, kv_heads: int, dim: int) -> KVGroup:
    """Pages of 64 keys and values in eight bits, random and with one scale."""
    kv, rng = new_pages(num_pages, layers, kv_heads, dim, 64, "int8"), np.random.default_rng(1)
    assert kv.k_scales is not None and kv.v_scales is not None
    kv.k[:], kv.v[:] = rng.integers(1, 256, kv.k.shape, np.uint8), rng.integers(-127, 128, kv.v.shape, np.int8)
    kv.k_scales[:] = kv.v_scales[:] = 0.02
    return kv


def tree_rows(table: np.ndarray, num: int, context: int) -> Rows:
    """`num` rows as a verify step has them: a root at `context` with num - 1 children, each with its own path."""
    rows = Rows(max(num, 1), 8, table)
    rows.num = num
    rows.write[:] = context + np.arange(num)
    rows.positions[:] = context + (np.arange(num) > 0)
    rows.context_len[:] = context
    rows.tail[:, 0], rows.tail[:, 1] = context, context + np.arange(num)
    rows.tail_len[:] = 1 + (np.arange(num) > 0)
    return rows


def bench_forward(
    weights: ModelWeights, context: int, row_counts: tuple[int, ...], arithmetic: str, rounds: int = 25
) -> dict[str, dict[str, float]]:
    """Milliseconds of one forward of m tree rows at a context, medians of rounds over the row counts; what verifying
    costs is the ratio to one row."""
    model = calls.NativeModel(weights, arithmetic)
    kv, table = new_kv(weights, context + 64)
    runs = {}
    for num in row_counts:
        rows, hidden = tree_rows(table, num, context), np.zeros((num, weights.config.hidden_size), np.float32)
        runs[num] = partial(model.forward, kv, rows, hidden)
    seconds: dict[int, list[float]] = {num: [] for num in row_counts}
    for _ in range(rounds):
        for num, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[num].append(time.perf_counter() - start)
    medians = {num: float(np.median(found)) for num, found in seconds.items()}
    one = medians[row_counts[0]]
    results = {str(num): {"ms": median * 1e3, "of_one_row": median / one} for num, median in medians.items()}
    print("  " + "  ".join(f"m={m}: {r['ms']:.2f} ms ({r['of_one_row']:.2f}x)" for m, r in results.items()))
    return results


def arithmetics() -> tuple[str, ...]:
    """What this CPU has."""
    return ("float32", *native_weights.paired_arithmetics())


def bench_forwards() -> dict[str, dict[str, dict[str, float]]]:
    """The demo's target, whose weights a cache may hold, and one of 400 MB, behind short and long contexts."""
    results = {}
    for name, shape, contexts in (
        ("10 layers x 384", (384, 10, 6, 2, 1024, 4096), (128,)),
        ("16 layers x 1024", (1024, 16, 16, 8, 2816, 4096), (128, 8192)),
    ):
        weights = random_model(*shape)
        for context in contexts:
            for arithmetic in arithmetics():
                label = f"{name}, {context} keys, {arithmetic}"
                print(f"forward: {label}")
                results[label] = bench_forward(weights, context, (1, 2, 4, 6, 8, 16, 32), arithmetic)
    return results


def bench_attention(context: int, arithmetic: str) -> dict[str, dict[str, float]]:
    """Microseconds of one layer's attention over `context` keys, beside the bytes of those keys, bfloat16, or eight
    bits if the arithmetic is int8.

    Layers are visited in turn so that the keys come from memory."""
    heads, kv_heads, dim, layers = 16, 8, 64, max(2, CACHE_BYTES // (2 * context * 8 * 64 * 2))
    num_pages = context // 64 + 2
    if arithmetic == "int8":
        kv = keys_in_codes(num_pages, layers, kv_heads, dim)
    else:
        v = random_values(num_pages, layers, kv_heads, 64, dim)
        kv = KVGroup(v.copy().reshape(-1, layers, kv_heads, 4, dim, 16), v)
    table = np.arange(num_pages, dtype=np.int32)[None].copy()
    described = buffers.describe_kv(kv)
    num_bytes = 2 * context * kv_heads * (dim + 4 if arithmetic == "int8" else 2 * dim)
    results = {}
    for num in (1, 4, 8, 16):
        rows = tree_rows(table, num, context)
        struct = buffers.describe_rows(rows)
        q, out = (
            np.random.default_rng(0).standard_normal((num, heads * dim), np.float32),
            np.empty((num, heads * dim), np.float32),
        )

        code = native.BFLOAT16_DOT if arithmetic == "bfloat16" else native.FLOAT32
        arguments = (ctypes.byref(struct), q.ctypes.data, heads, 0.125, 0, None, code, out.ctypes.data)
        attend = partial(calls.library().attention, ctypes.byref(described))
        seconds = quick_seconds([partial(attend, layer, *arguments) for layer in range(layers)])
        results[str(num)] = {"us": seconds * 1e6, "gb_s": num_bytes / seconds / 1e9}
        print(f"  m={num:3d}  {seconds * 1e6:8.1f} us  {num_bytes / seconds / 1e9:6.1f} GB/s of keys and values")
    return results


def bench_head(vocab: int, hidden: int) -> dict[str, float]:
    """Microseconds of a draw and of a top-k from the head, one row."""
    weights = random_model(hidden, 1, hidden // 64, 1, 64, vocab)
    model, state = calls.NativeModel(weights), np.random.default_rng(0).standard_normal((1, hidden), np.float32)
    index = np.zeros(1, np.int32)

    def sampling(temperature: float, top_p: float) -> RowSampling:
        how = np.zeros(1, SAMPLING)
        how["temperature"], how["top_p"] = temperature, top_p
        return how

    runs = {
        "greedy": lambda s=sampling(0.0, 1.0): model.draw(state, index, s),
        "temperature": lambda s=sampling(1.0, 1.0): model.draw(state, index, s),
        "top_p": lambda s=sampling(1.0, 0.9): model.draw(state, index, s),
        "top_k": lambda: model.top_k(state, index, 10),
    }
    results = {name: quick_seconds([run]) * 1e6 for name, run in runs.items()}
    print("  " + "  ".join(f"{name}: {us:.0f} us" for name, us in results.items()))
    return results


def main() -> None:
    """Print every table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default=None)
    parser.add_argument("--quick", action="store_true", help="one shape of linear only")
    args = parser.parse_args()
    calls.set_threads(args.threads)
    calls.select_isa(args.isa)
    report: dict[str, object] = {"machine": platform.processor() or platform.machine(), **calls.system()}
    report["read_gb_s"] = read_bandwidth()
    print(f"{report}")
    integer = [(dtype, "int8") for dtype in ("int8", "int4", "Q8_0", "Q4_0", "Q4_1")]
    stored = [(dtype, "float32") for dtype in ("bfloat16", "int8", "int4")]
    shapes = [(2816, 1024, *how) for how in (*integer, *stored)]
    if not args.quick:
        shapes += [(11008, 4096, *how) for how in (*integer, *stored)]
        for n, k, dtype in ((1024, 2816, "bfloat16"), (2816, 1024, "float32"), (384, 384, "bfloat16")):
            shapes.append((n, k, dtype, "float32"))
    linears = {}
    for n, k, dtype, arithmetic in shapes:
        name = f"{n}x{k} {dtype}, {arithmetic} arithmetic"
        print(f"linear {name}")
        linears[name] = bench_linear(n, k, dtype, arithmetic)
    report["linear"] = linears
    if not args.quick:
        report["forward"] = bench_forwards()
        for context in (2048, 8192):
            print(f"attention: 16/8 heads of 64, {context} keys")
            for arithmetic in (*arithmetics(), "int8"):
                report[f"attention_{context}_{arithmetic}"] = bench_attention(context, arithmetic)
        for vocab, hidden in ((4096, 384), (151936, 256)):
            print(f"head: vocabulary {vocab}, hidden {hidden}, one row")
            report[f"head_{vocab}_us"] = bench_head(vocab, hidden)
    print(json.dumps(report))


if __name__ == "__main__":
    main()

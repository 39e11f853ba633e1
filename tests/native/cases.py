"""What is recorded: every format in every arithmetic that all CPUs have, every single operation, forwards and steps.

python -m tests.native.cases FILE writes the file that replay.cpp reads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from tests.conftest import engine_config, from_modules, round_to, tiny_pair
from tests.native.recorder import Recorder

from aquiline.backends.cpu import calls, native
from aquiline.backends.cpu.native_text_index import NativeIndex
from aquiline.backends.cpu.native_weights import library
from aquiline.blocks import BLOCK_TYPES
from aquiline.config import MAX_DEPTH, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.models.model_weights import ModelWeights
from aquiline.spec.drafting import Chain, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup
from aquiline.types import Rows

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "ops"))
import native_calls as ops
from blocks import WIDTHS, random_blocks
from codes import CodedCache
from test_expert_rows import GPT_OSS, with_experts
from test_forward import TOKENS, chunk_rows, like_gemma, new_kv, random_weights, run
from test_sampling import sampling

sys.path.pop(0)

ROWS = (1, 2, 3, 5, 7, 8, 17)
"""Rows of linears: every width of a tile, and more than one tile."""


@contextmanager
def recording(path: Path) -> Iterator[Recorder]:
    """Every call of the native library goes through a recorder meanwhile."""
    recorder = Recorder(library(), path)
    with mock.patch.object(native, "load", lambda: recorder), mock.patch.object(ops, "LOADED", recorder):
        yield recorder
    recorder.close()


def record(path: Path) -> int:
    """Write the file; returns the number of calls in it."""
    with recording(path) as recorder:
        linears(recorder)
        elementwise(recorder)
        drawing(recorder)
        attention(recorder)
        forwards(recorder)
        steps(recorder)
        lookups(recorder)
    return recorder.num_calls


def floats(*shape: int, scale: float = 1.0, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def linears(recorder: Recorder) -> None:
    """All formats, with a width of 5 blocks of outputs and a partial one; inputs with outliers, zeros and a NaN."""
    n, k = 93, 512
    x = floats(17, k, seed=1)
    x[:, ::7] *= 30
    x[3, :32], x[4, 64:96] = 0, 1e-42
    weight = torch.from_numpy(floats(n, k, scale=0.05))
    weight[0, :4] = torch.tensor([1e-41, -1e-41, 0.0, -0.0])
    stored: list[tuple[str, Any, str, str | None]] = [
        (str(dtype), weight.to(dtype), "float32", None) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    stored.append(("bfloat16", weight.bfloat16(), "bfloat16_tiles", None))
    for arithmetic in ("float32", "int8"):
        stored += [(dtype, weight, arithmetic, dtype) for dtype in ("int8", "int4")]
        stored += [(kind, random_blocks(kind, n, 2 * WIDTHS[kind]), arithmetic, None) for kind in BLOCK_TYPES]
    for name, given, arithmetic, dtype in stored:
        recorder.label(f"linear {name} in {arithmetic}")
        linear = ops.native_linear(given, torch.linspace(-1, 1, n), arithmetic, dtype)
        inputs = np.ascontiguousarray(x[:, : linear.num_inputs])
        for rows in ROWS:
            linear(inputs[:rows])
        if arithmetic == "int8":
            inputs[1, 40] = np.nan  # its scale is a NaN that the library writes, so that all machines have the same one
            linear(inputs[:3])


def elementwise(recorder: Recorder) -> None:
    """Norms, swiglu, rotary embeddings, exp and log at their edges, noise."""
    recorder.label("elementwise")
    x = floats(5, 208, scale=3.0)
    ops.rms_norm(x, floats(208, seed=1), 1e-5)
    ops.swiglu(floats(3, 96, scale=20.0), floats(3, 96))
    frequencies = (10000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)
    ops.rope(floats(4, 3, 64), np.array([0, 1, 4095, 1_000_000], np.int32), frequencies, 1.3)
    edges = [0, -0.0, 1, -1, 87.3, -87.3, 88.8, -88.8, 1e-30, 1e30, np.inf, -np.inf, 1e-38, 0.5, 2**-126, 3e38]
    ops.exp_log(np.concatenate((np.array(edges, np.float32), floats(1000, scale=20.0))))
    for seed, position in ((0, 0), (2**63 + 5, 77)):
        ops.gumbel(seed, position, 1003)


def drawing(recorder: Recorder) -> None:
    """Draws with every filter, over ties, infinities and NaN."""
    recorder.label("drawing")
    logits = floats(8, 1003, scale=3.0)
    ties = np.round(logits)
    for rows in (logits, ties):
        for how in ({}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.8}, {"min_p": 0.1}):
            ops.draw(rows, sampling(8, **({"temperature": 0.8, "seed": 3} | how)))
        ops.draw(rows, sampling(8, 1.2, 50, 0.9, 0.01, seed=2**62))
    broken = np.zeros((5, 35), np.float32)
    broken[0, 20], broken[1], broken[2], broken[3, 1:] = np.nan, -np.inf, np.inf, -np.inf
    for temperature in (0.0, 1.0):
        ops.draw(broken, sampling(5, temperature))


def attention(recorder: Recorder) -> None:
    """Trees and chunks over more than a span, with windows, sinks and all key dtypes."""
    for dtype, arithmetic in (
        (torch.float32, native.FLOAT32),
        (torch.bfloat16, native.FLOAT32),
        (torch.bfloat16, native.BFLOAT16_TILES),
        (torch.int8, native.FLOAT32),
    ):
        recorder.label(f"attention over {dtype} keys, {native.FORMATS[arithmetic]}")
        length, kv_heads, dim = 700, 2, 32
        in_codes = dtype == torch.int8
        cache = CodedCache.new(708, 2, dim, 32) if in_codes else ops.Cache.new(708, 2, dim, 32, dtype)
        cache.write(
            0, np.arange(length + 8), floats(length + 8, kv_heads, dim), floats(length + 8, kv_heads, dim, seed=1)
        )
        rows = [ops.Row(n) for n in (1, 15, 16, 63, 64, 65, 511, 512, 513, 700)]
        rows += [ops.Row(length, (length, length + 3)), ops.Row(length, (length, length + 2, length + 5), 9)]
        q, sinks = floats(len(rows), 6, dim, seed=2), np.linspace(-2, 2, 6).astype(np.float32)
        for window, sink in ((0, None), (100, sinks)):
            ops.attention(cache, rows, q, 0.2, window, sink, arithmetic)
        chunk = [ops.Row(500 + i) for i in range(1, 150)]
        ops.attention(cache, chunk, floats(len(chunk), 6, dim, seed=3), 0.2, arithmetic=arithmetic)


def forwards(recorder: Recorder) -> None:
    """Whole models in several storages and arithmetics: a prompt, a tree behind it, a draft, and all heads."""
    for dtype, arithmetic, quantised in (
        (torch.float32, "float32", None),
        (torch.bfloat16, "float32", None),
        (torch.bfloat16, "bfloat16_tiles", None),
        (torch.bfloat16, "float32", "int4"),
        (torch.bfloat16, "int8", "int8"),
        (torch.bfloat16, "int8", None),
    ):
        for is_draft in (False, True):
            recorder.label(f"forward, {dtype}, {quantised} in {arithmetic}, {'draft' if is_draft else 'target'}")
            weights = random_weights(dtype, 1 if is_draft else 3, is_draft, extras=True)
            if (arithmetic, quantised) == ("int8", None):
                weights = in_parts(weights)
            model = calls.NativeModel(weights, arithmetic, quantised)
            kv, table = new_kv(weights, dtype=torch.int8 if quantised == "int8" else torch.bfloat16)
            g = floats(140, weights.config.hidden_size, seed=4) if is_draft else None
            prompt = chunk_rows(table, TOKENS, 0, 120)
            hidden, _ = run(model, kv, prompt, features=0 if is_draft else 2, g=g)
            run(model, kv, tree_rows(table, 120), features=0 if is_draft else 2, g=g)
            heads(model, hidden)
    for kind, arithmetic in ((None, "float32"), ("MXFP4", "float32"), ("MXFP4", "int8")):
        recorder.label(f"forward with experts, {kind} in {arithmetic}")
        weights = with_experts(GPT_OSS, torch.bfloat16, kind)
        model = calls.NativeModel(weights, arithmetic)
        kv, table = new_kv(weights)
        run(model, kv, chunk_rows(table, TOKENS, 0, 40), features=2)
        run(model, kv, tree_rows(table, 40), features=2)
    for quantised, arithmetic in ((None, "float32"), ("int8", "int8")):
        recorder.label(f"forward with norms of outputs, {quantised} in {arithmetic}")
        model = calls.NativeModel(like_gemma(random_weights(extras=True)), arithmetic, quantised)
        kv, table = new_kv(weights)
        run(model, kv, chunk_rows(table, TOKENS, 0, 40), features=2)
        run(model, kv, tree_rows(table, 40), features=2)


def in_parts(weights: ModelWeights) -> ModelWeights:
    """The same model with queries, keys and values in blocks of three types."""
    config, width = weights.config, weights.layers[0].attention.qkv[0].shape[1]
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parts = tuple(random_blocks(kind, n, width) for kind, n in (("Q8_0", q), ("Q4_1", kv), ("IQ4_NL", kv)))
    layers = (replace(layer, attention=replace(layer.attention, qkv=parts)) for layer in weights.layers)
    return replace(weights, layers=tuple(layers))


def tree_rows(table: Any, root: int) -> Rows:
    """A root with two children, and a child of the second."""
    rows = Rows(4, 4, table, num=4)
    rows.tokens[:], rows.write[:] = TOKENS[root : root + 4], np.arange(root, root + 4)
    rows.positions[:] = [root, root + 1, root + 1, root + 2]
    rows.context_len[:] = root
    for i, path in enumerate(([0], [0, 1], [0, 2], [0, 2, 3])):
        rows.tail_len[i] = len(path)
        rows.tail[i, : len(path)] = root + np.array(path)
    return rows


def heads(model: calls.NativeModel, hidden: Any) -> None:
    index = np.array([119, 0, 7, 64], np.int32)
    d2t = np.arange(model.head_size, dtype=np.int32) if model.is_draft else None
    model.logits(hidden, index)
    model.draw(hidden, index, sampling(4, 0.9, 20, 0.95, seed=5), d2t)
    model.draw(hidden, index, sampling(4, 0.0), d2t)
    for how in (sampling(4, 0.9, 20, 0.95, seed=5), sampling(4, 0.8), sampling(4, 0.0)):
        ops.guess(model, hidden, index, how, d2t)
    model.top_k(hidden, index, 10)
    model.top_k(hidden, index, 5, sampling(4, 0.7, seed=6), d2t)
    model.logprobs(hidden, index, np.array([0, 3, 99, 202], np.int32), 4)


def steps(recorder: Recorder) -> None:
    """Steps of a small pair until texts end: several ways to draft, requests with rules, batches of two."""
    wishes = {
        "greedy": SamplingParams(max_tokens=24, ignore_eos=True),
        "sampled": SamplingParams(max_tokens=24, temperature=0.9, seed=1, ignore_eos=True),
        "filtered": SamplingParams(
            max_tokens=24, temperature=1.2, seed=2, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2,
            presence_penalty=0.4, frequency_penalty=0.3, logit_bias={24: -1.5, 7: 2.0}, ignore_eos=True,
        ),
    }  # fmt: skip
    prompts = [np.random.default_rng(i).integers(1, 90, n).tolist() for i, n in enumerate((70, 3))]
    ways = (NoDraft(), Chain(3), Static(), Dynamic(depth=3, top_k=3, num_nodes=12))
    for dtype, arithmetic, kv_dtype in (("bfloat16", "float32", "auto"), ("int4", "int8", "int8")):
        decoder, head = tiny_pair()
        for module in (decoder, head):
            round_to(module, torch.bfloat16)
        models = from_modules(decoder, head, None, Loading(dtype, arithmetic, kv_dtype), Environment(None, 1))
        for most in (1, 8):
            llm = LLM.from_models(models, engine_config(4, num_pages=24, num_continuous_decode_steps=most))
            for drafting in ways if most == 1 else ways[:2]:
                for name, wish in wishes.items():
                    recorder.label(f"steps, up to {most} in one call, {dtype} in {arithmetic}, {drafting}, {name}")
                    llm.run(prompts, wish, drafting=drafting)


def lookups(recorder: Recorder) -> None:
    """Two texts that repeat themselves, of which one is expected, and their common events."""
    recorder.label("lookups")
    draw, drafting = np.random.default_rng(0), Lookup(1, MAX_DEPTH, 0.01)
    shared = drafting.shared(NativeIndex)
    phrases = [draw.integers(0, 40, draw.integers(3, 30)).tolist() for _ in range(9)]
    texts = [[token for i in draw.integers(0, 9, 20) for token in phrases[i]] for _ in range(2)]
    proposers = [drafting.proposer(texts[0][:50], texts[1][20:90], shared), drafting.proposer(texts[1][:9], (), shared)]
    for num in range(51, 250, 3):
        for text, proposer in zip(texts, proposers, strict=True):
            proposer.propose(text[:num], drafting.max_draft)


if __name__ == "__main__":
    print(f"{record(Path(sys.argv[1]))} calls")

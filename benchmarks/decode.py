"""Decoding without speculation: against transformers on the same weights, and at length against the bytes it must read.

Part 1: the bundled target (or --target DIR), a prompt of real tokens, 128 new ones, greedy: aquiline, and transformers'
eager `generate` in float32 and bfloat16, alternated, medians. Part 2: a random-weight target at several contexts: the
time of one step, beside its linears alone and the bytes of keys and values it reads at the bandwidth of plain reads,
with the pages in one extent, as the pool lays them out for a lone sequence, and in random order. Ends with one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.backends.cpu.native_backend import CpuBackend
from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.results.intervals import decode_tokens_per_s, rotated, spans_of
from aquiline.bench.suite.scenarios import random_models
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.models.known_pairs import BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.models.model_config import ModelConfig, RopeConfig
from aquiline.spec.drafting import NoDraft

NEW_TOKENS = 128
RANDOM_TARGET = ModelConfig(
    family="llama", vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
    head_dim=64, max_positions=32768, rms_norm_eps=1e-5, rope=RopeConfig(),
)  # fmt: skip


def against_transformers(target: Path, prompt_ids: list[int], repeats: int) -> dict[str, float]:
    """Median decode tok/s of each engine: the time of the prompt and one token is taken off the time of 129."""
    from transformers import AutoModelForCausalLM

    llm = LLM(target, engine=EngineConfig(max_batch=1))
    models = {
        f"transformers {name}": AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, attn_implementation="eager", trust_remote_code=False
        ).eval()
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    input_ids = torch.tensor([prompt_ids])
    rates: dict[str, list[float]] = {"aquiline": [], **{name: [] for name in models}}
    sampling = SamplingParams(max_tokens=NEW_TOKENS + 1, ignore_eos=True)
    for round_ in range(repeats + 1):  # the first round warms up
        for name in rotated(list(rates), round_):
            if name == "aquiline":
                outputs = llm.run([prompt_ids], sampling, drafting=NoDraft()).outputs
                rates[name].append(decode_tokens_per_s(spans_of(outputs)))
                continue
            model, seconds = models[name], []
            for count in (1, NEW_TOKENS + 1):
                began = time.perf_counter()
                model.generate(
                    input_ids, attention_mask=torch.ones_like(input_ids), do_sample=False, max_new_tokens=count,
                    min_new_tokens=count, pad_token_id=0,
                )  # fmt: skip
                seconds.append(time.perf_counter() - began)
            rates[name].append(NEW_TOKENS / (seconds[1] - seconds[0]))
    return {name: statistics.median(values[1:]) for name, values in rates.items()}


def read_bandwidth() -> float:
    """Bytes per second of one pass over memory that no cache holds, all threads, best of several."""
    data = torch.ones(64 * 2**20)
    best = 0.0
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = max(best, data.nbytes / (time.perf_counter() - began))
    return best


def at_length(contexts: tuple[int, ...], repeats: int = 30) -> list[dict[str, float]]:
    """Median ms of one decode step of a random-weight target at each context, pages in one extent and scattered."""
    models = random_models(RANDOM_TARGET, Loading("bfloat16"))
    size, pages = 64, RANDOM_TARGET.max_positions // 64
    backend = models.pair.open(Sizes(1, pages, size, pages, 1))
    assert isinstance(backend, CpuBackend), "this benchmark is about the native library"
    for keys in (backend.kv.k, backend.kv.v):
        keys[:] = np.random.default_rng(1).standard_normal(keys.shape, np.float32)
    in_order, scattered = range(pages), np.random.default_rng(0).permutation(pages).tolist()
    bandwidth = read_bandwidth()

    def step_ms(context: int, order: Sequence[int] = in_order) -> float:
        """Of a forward of one row that sees `context` keys or up to `repeats` more; the keys before it are as a prefix
        cache would have them."""
        admit = Admit(0, [1] * context, context, SamplingParams(seed=0), num_hit=context - 1)
        prompt = (Chunk(0, context - 1, context, is_last=True, draws=True),)
        backend.step(StepInput(admits=(admit,), pages=(Pages(0, 0, tuple(order)),), chunks=prompt)).read()
        step = StepInput(decodes=(Decode(0, NoDraft()),))
        return 1e3 * statistics.median(backend.step(step).read().seconds["verify"] for _ in range(repeats))

    linears_ms = step_ms(1)
    table = []
    for context in contexts:
        kv_bytes = context * models.pair.kv_bytes_per_token()[0]
        kv_ms = 1e3 * kv_bytes / bandwidth
        ms, scattered_ms = step_ms(context), step_ms(context, scattered)
        table.append({
            "context": context, "step_ms": ms, "scattered_ms": scattered_ms, "linears_ms": linears_ms,
            "kv_ms_at_bandwidth": kv_ms,
            "attention_over_bytes": (ms - linears_ms) / kv_ms, "read_gb_per_s": bandwidth / 1e9,
        })  # fmt: skip
        print(
            f"context {context:>5}: step {ms:.2f} ms = linears {linears_ms:.2f} + {(ms - linears_ms) / kv_ms:.2f} x "
            f"the {kv_ms:.2f} ms that {kv_bytes / 1e6:.0f} MB of KV take at {bandwidth / 1e9:.0f} GB/s; "
            f"pages scattered {scattered_ms:.2f} ms"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=BUNDLED_TARGET)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32000])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(args.target, engine=EngineConfig(max_batch=1))
    prompt_ids = llm.encode(read_prompts(BUNDLED_PROMPTS)[0].text)
    rates = against_transformers(args.target, prompt_ids, args.repeats)
    fastest = max(rate for name, rate in rates.items() if name != "aquiline")
    for name, rate in rates.items():
        print(f"{name:>22}: {rate:7.1f} tok/s")
    print(f"aquiline is {rates['aquiline'] / fastest:.2f}x the faster transformers dtype")
    table = at_length(tuple(args.contexts))
    print(json.dumps({"benchmark": "decode", "tokens_per_s": rates, "at_length": table, "system": llm.models.system()}))


if __name__ == "__main__":
    main()

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
from pathlib import Path

import numpy as np
import torch

from aquiline.bench.clock import decode_tokens_per_s, spans_of
from aquiline.bench.intervals import rotated
from aquiline.bench.prompts import read_prompts
from aquiline.config import EngineConfig, Environment, SamplingParams, SpecConfig
from aquiline.engine.bundled import BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.engine.llm import LLM
from aquiline.engine.model import from_modules, geometry
from aquiline.models.config import ModelConfig, RopeConfig
from aquiline.models.decoder import Decoder
from aquiline.types import Rows

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
            target, dtype=dtype, attn_implementation="eager"
        ).eval()
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16))
    }
    input_ids = torch.tensor([prompt_ids])
    rates: dict[str, list[float]] = {"aquiline": [], **{name: [] for name in models}}
    sampling = SamplingParams(max_tokens=NEW_TOKENS + 1, ignore_eos=True)
    for round_ in range(repeats + 1):  # the first round warms up
        for name in rotated(list(rates), round_):
            if name == "aquiline":
                outputs = llm.run([prompt_ids], sampling, spec=SpecConfig(drafter="none")).outputs
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
    decoder = Decoder(RANDOM_TARGET)
    for weight in decoder.parameters():
        weight.data = (torch.randn(weight.shape) * 0.02).to(torch.bfloat16)
    config = EngineConfig(max_batch=1)
    models = from_modules(decoder, None, None, "bfloat16", config, Environment.read())
    pages = RANDOM_TARGET.max_positions // config.page_size
    kv = models.new_target_kv(pages, config.page_size)
    kv.k.normal_()
    kv.v.normal_()
    rows = Rows(1, 1, np.arange(pages, dtype=np.int32)[None])
    rows.num = 1
    scattered = np.random.default_rng(0).permutation(pages).astype(np.int32)
    bandwidth = read_bandwidth()

    def step_ms(context: int, order: np.ndarray | None = None) -> float:
        rows.page_table[0] = np.arange(pages, dtype=np.int32) if order is None else order
        rows.positions[0] = rows.write[0] = context - 1
        rows.context_len[0] = context
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            models.target.forward(rows, kv)
            times.append(time.perf_counter() - began)
        return 1e3 * statistics.median(times)

    linears_ms = step_ms(1)
    table = []
    for context in contexts:
        kv_bytes = context * geometry(RANDOM_TARGET).bytes_per_token(torch.bfloat16)
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

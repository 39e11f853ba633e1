"""Is a whole bulk run ever slower with adaptive drafting? Prompts of real text, all handed in at once, so that prompts
are computed beside sequences that decode; the time is that of the run, prompts included. Answers of one length that do
not draft all end together, so that no place is ever idle, which no other setting has; --spread takes that away.

Every setting writes every answer in every round, in an order that rotates, and all write the same tokens. Ratios are
paired by round: medians with intervals. "none" is an engine whose requests never draft.

    python benchmarks/bulk.py --batches 1 4 16 --temperatures 0 0.8
    python benchmarks/bulk.py --smollm2 MODEL.gguf

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from turns import prompts_of

from aquiline.bench.results.intervals import paired, rotated
from aquiline.bench.results.result import commit
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.metrics import RunSummary
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft

SETTINGS: dict[str, Drafting] = {
    "none": NoDraft(), "chain-1": Chain(1), "chain-2": Chain(2), "chain-3": Chain(3), "adaptive": Adaptive(),
}  # fmt: skip
MAX_CONTEXT = 1024


def measure(
    llm: LLM, prompts: list[list[int]], temperature: float, lengths: list[int], rounds: int, names: list[str]
) -> dict[str, list[RunSummary]]:
    """Whole runs of every setting in turn. The first round warms up and is left out."""
    found: dict[str, list[RunSummary]] = {name: [] for name in names}
    sampling = [
        SamplingParams(max_tokens=length, temperature=temperature, seed=i, ignore_eos=True)
        for i, length in enumerate(lengths)
    ]
    expected: list[list[int]] = []
    for number in range(rounds + 1):
        for name in rotated(names, number):
            result = llm.run(prompts, sampling, drafting=SETTINGS[name])
            tokens = [output.token_ids for output in result.outputs]
            expected = expected or tokens
            assert tokens == expected, f"{name} changed the text"
            if number:
                found[name].append(result.summary)
    return found


def row_of(runs: dict[str, list[RunSummary]]) -> dict[str, object]:
    """Tokens per second of each setting, and how many times as fast as requests that never draft it is: whole, in steps
    with prompts, in the others."""
    row: dict[str, object] = {}
    for name, own in runs.items():
        whole, prompts, steps = (
            paired(*([getattr(run, part) or 1.0 for run in some] for some in (runs["none"], own)))  # 0: no such steps
            for part in ("wall_ms", "prefill_ms", "decode_ms")
        )
        last, rate = own[-1], statistics.median(run.tokens_per_s for run in own)
        row[name] = {
            "tokens_per_s": rate, "over_none": [whole.value, whole.low, whole.high], "prompts": prompts.value,
            "steps": steps.value, "tau": last.counters.tau, "choosing": last.choices.choosing_ms / last.wall_ms,
            "sources": dict(last.choices.steps),
        }  # fmt: skip
        print(
            f"  {name:>8}: {rate:.0f} tok/s, {whole.times()} (prompts {prompts.value:.2f}x, steps {steps.value:.2f}x), "
            f"tau {last.counters.tau:.2f}, choosing {last.choices.choosing_ms / last.wall_ms:.1%}", flush=True,
        )  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="SmolLM2-135M-Instruct's checkpoint; default: the bundled pair")
    parser.add_argument("--draft", default=str(Path(__file__).parent.parent / "src/aquiline/data/smollm2/draft"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8, 1.0])
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=250)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--spread", type=int, default=0, help="tokens by which an answer may be longer or shorter")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    args = parser.parse_args()
    spread = random.Random(0)
    lengths = [args.new_tokens + spread.randint(-args.spread, args.spread) for _ in range(args.prompts)]
    names = ("bundled", None) if args.smollm2 is None else (args.smollm2, args.draft)
    table = []
    for batch in args.batches:
        config = EngineConfig(max_batch=batch, max_context=MAX_CONTEXT, prefix_cache=False)
        llm = LLM(*names, drafting=Adaptive(), engine=config)
        text = "library" if args.smollm2 is None else "chat"
        prompts = prompts_of(llm, args.smollm2 is not None, text, args.prompt_tokens, args.prompts)
        for temperature in args.temperatures:
            print(f"{'smollm2' if args.smollm2 else 'bundled'}, batch {batch}, temperature {temperature:g}")
            runs = measure(llm, prompts, temperature, lengths, args.rounds, args.settings)
            table.append({"batch": batch, "temperature": temperature} | row_of(runs))
        system = llm.models.system()
        llm.close()
    print(json.dumps({"benchmark": "bulk", "table": table, "system": system, "commit": commit()}))


if __name__ == "__main__":
    main()

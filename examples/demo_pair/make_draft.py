"""Make the demo's draft: train on source text, let the target write, train on what it wrote.

    python make_draft.py all --target target --corpus corpus --out draft
    python make_draft.py generate --target target --corpus corpus/train.bin --out own_text.jsonl --minutes 15

`generate` continues beginnings of training documents in batches, each greedy or sampled, and writes JSONL rows
{"input_ids"}. The prompt counts in training too: the target has a distribution there as well, and it
costs nothing. `all` is README.md's steps 3 and 4.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from aquiline import LLM, EngineConfig, SamplingParams

TEMPERATURES = (0.0, 0.8, 1.0)
SHAPE = ["--draft-vocab-size", "3072", "--intermediate-size", "768", "--lr", "3e-3"]
TRAINING = ["--context", "512", "--batch-size", "8", "--ttt-steps", "5", "--late-share", "0.25"]


def generate(args: argparse.Namespace) -> None:
    llm = LLM(args.target, engine=EngineConfig(max_batch=args.rows, max_context=args.context))
    stream = np.fromfile(args.corpus, dtype=np.uint16)
    starts = np.flatnonzero(stream == 0)
    rng = np.random.default_rng(args.seed)
    begun, written = time.perf_counter(), 0
    with args.out.open("w", encoding="utf-8") as file:
        while time.perf_counter() - begun < 60 * args.minutes:
            length = int(rng.integers(32, args.context // 2))
            prompts = [_prompt(stream, starts, length, rng).tolist() for _ in range(args.rows)]
            sampling = SamplingParams(
                max_tokens=args.context - length, temperature=float(rng.choice(TEMPERATURES)), ignore_eos=True
            )
            for output in llm.generate(prompts, sampling):
                file.write(json.dumps({"input_ids": output.prompt_ids + output.token_ids}) + "\n")
                written += len(output.token_ids)
            print(f"{written} new tokens, {written / (time.perf_counter() - begun):.0f}/s", flush=True)


def _prompt(stream: np.ndarray, starts: np.ndarray, length: int, rng: np.random.Generator) -> np.ndarray:
    """A document's beginning, or as often the middle of one, behind id 0 as every document is."""
    if rng.integers(2):
        at = int(rng.choice(starts[starts + length < len(stream)]))
        return stream[at : at + length].astype(np.int64)
    at = int(rng.integers(0, len(stream) - length))
    return np.concatenate(([0], stream[at : at + length - 1])).astype(np.int64)


def everything(args: argparse.Namespace) -> None:
    own_text, first = args.out / "own_text.jsonl", args.out / "on-source"
    args.out.mkdir(parents=True, exist_ok=True)
    common = ["--target", str(args.target), "--held-out", str(args.corpus / "held_out.bin"), *TRAINING]
    _train("--data", str(args.corpus / "train.bin"), "--out", str(first), *SHAPE, "--minutes", "30", *common)
    args.corpus, args.out, out = args.corpus / "train.bin", own_text, args.out
    generate(args)
    _train("--data", str(own_text), "--out", str(out), "--init", str(first), "--lr", "1e-3", "--minutes", "15", *common)


def _train(*options: str) -> None:
    command = [sys.executable, "-c", "from aquiline.cli.main import app; app()", "train", *options]
    print(" ".join(command), flush=True)
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["all", "generate"])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, required=True, help="all: its folder; generate: the .bin to begin from")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=15, help="of generation")
    parser.add_argument("--rows", type=int, default=16, help="continued at once")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    everything(args) if args.what == "all" else generate(args)


if __name__ == "__main__":
    main()

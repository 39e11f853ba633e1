"""Where the steps of one stream stand: beside plain reads, by verified rows, as trees and chains, and for the host.

Run: python benchmarks/steps.py [--target DIR ...]. Per target (smollm2 and the bundled pair, and files such as those of
benchmarks/restored.py):

- share of plain reads: a step of one row reads every weight and key once. Steps and a plain read of as many bytes take
  turns, since a shared machine's bandwidth changes within seconds; the share is the median of the rounds' ratios. The
  read is torch's sum, or the native library's product with one row of float32, whichever is faster in its round.
- rows: the same step with more rows to verify, over one of one row; and a tree of six nodes over a chain of five.
- host: what a step takes beyond the native calls. Steps that one call repeats share it.

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
import torch

from aquiline.backends.cpu import calls
from aquiline.bench.data.prompts import read_prompts
from aquiline.bench.results.intervals import Estimate, estimate, rotated
from aquiline.bench.theory.roofline import roofline_of
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.known_pairs import BUNDLED_PROMPTS
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

CONTEXT, STEPS, WIDTH = 128, 24, 1024
PLAIN = NoDraft()
CHAINS = {f"{k + 1} rows": Chain(k) for k in (3, 7, 15)}
SHAPES: dict[str, Drafting] = {"chain-5": Chain(5), "tree of 6": Dynamic(2, 2, 6)}


class Stream:
    """One request of a model at a time, each step of it timed."""

    def __init__(self, target: str, dtype: str) -> None:
        self.llm = LLM(target, dtype=dtype, engine=EngineConfig(max_batch=1))
        self.prompt = self.llm.encode(read_prompts(BUNDLED_PROMPTS)[0].text)[:CONTEXT]

    def steps(self, drafting: Drafting) -> dict[str, list[float]]:
        """Seconds of STEPS steps or a few more behind the prompt: the whole step, the host's part, and each stage. Of
        steps that were computed together each has the mean."""
        engine = self.llm.engine
        sampling = SamplingParams(max_tokens=40 * STEPS, ignore_eos=True, seed=0)
        request = self.llm.request(0, self.prompt, sampling, drafting=drafting)
        engine.add(request)
        found: dict[str, list[float]] = {"step": [], "host": [], "verify": [], "draft": []}
        engine.step()  # the prompt; the first steps behind it warm the caches
        num_done = 0
        while num_done < STEPS + 2:
            stages, began = list[dict[str, float]](), time.perf_counter()
            while not stages or engine.is_ahead:
                engine.step()
                assert engine.pipeline.last is not None
                stages.append(engine.pipeline.last.output.seconds)
            seconds, num = time.perf_counter() - began, len(stages)
            num_done += num
            if num_done <= 2:
                continue
            inside = {name: statistics.mean(each[name] for each in stages) for name in stages[0]}
            found["step"] += [seconds / num] * num
            found["host"] += [seconds / num - sum(inside.values())] * num
            found["verify"] += [inside["verify"] + inside["keep"]] * num
            found["draft"] += [inside["draft"]] * num
        engine.abort(request.id)
        return found

    def step_bytes(self) -> float:
        """What a plain step in the middle of such a run reads."""
        return roofline_of(self.llm.models).step(1, CONTEXT + STEPS // 2).cost.num_bytes


class Reader:
    """Reads as many bytes as a step does."""

    def __init__(self, num_bytes: float) -> None:
        data = torch.ones(int(num_bytes) // 4 // WIDTH, WIDTH)
        row = np.ones((1, WIDTH), np.float32)
        self.num_bytes = data.nbytes
        self._ways: tuple[Callable[[], object], ...] = (
            data.view(-1).sum,
            partial(calls.NativeLinear(data.numpy()), row),
        )

    def read(self) -> float:
        """Bytes per second of the faster way, medians of STEPS reads each."""
        return self.num_bytes / min(self._seconds(way) for way in self._ways)

    def _seconds(self, way: Callable[[], object]) -> float:
        times = []
        time.sleep(0.005)  # the worker threads of torch and of the library spin for a moment
        for _ in range(STEPS + 2):
            began = time.perf_counter()
            way()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])


def measure(target: str, dtype: str, rounds: int) -> dict[str, Estimate]:
    """All figures of one target, medians over rounds with their intervals."""
    stream = Stream(target, dtype)
    reader = Reader(stream.step_bytes())
    has_draft = stream.llm.models.draft_config is not None
    specs: dict[str, Drafting] = {"plain": PLAIN, **(CHAINS | SHAPES if has_draft else {})}
    figures: dict[str, list[float]] = {}

    def add(name: str, value: float) -> None:
        figures.setdefault(name, []).append(value)

    for index in range(rounds + 1):
        time.sleep(0.005)
        found = {name: stream.steps(specs[name]) for name in rotated(list(specs), index)}
        reads = reader.read()
        time.sleep(0.005)
        after = stream.steps(PLAIN)
        if index == 0:
            continue
        medians = {name: {part: statistics.median(times) for part, times in run.items()} for name, run in found.items()}
        plain = min(statistics.median(after["step"]), medians["plain"]["step"])
        native = min(statistics.median(after["verify"]), medians["plain"]["verify"])
        add("plain, ms", 1e3 * plain)
        add("plain reads, GB/s", reads / 1e9)
        add("share of plain reads, whole step", reader.num_bytes / plain / reads)
        add("share of plain reads, native part", reader.num_bytes / native / reads)
        add("host of a plain step, us", 1e6 * medians["plain"]["host"])
        if not has_draft:
            continue
        for name in CHAINS:
            add(f"verify {name}, over one", medians[name]["verify"] / medians["plain"]["verify"])
        add("host of chain-3, us", 1e6 * medians["4 rows"]["host"])
        add("step of a tree of 6, over chain-5", medians["tree of 6"]["step"] / medians["chain-5"]["step"])
    return {name: estimate(values) for name, values in figures.items()}


def show(label: str, figures: dict[str, Estimate]) -> None:
    """One line a figure."""
    print(label)
    for name, value in figures.items():
        low, high = value.low or value.value, value.high or value.value
        print(f"  {name:<36}{value.value:9.3f} [{low:.3f}, {high:.3f}]", flush=True)


def main() -> None:
    """Every target in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", nargs="+", default=["bundled", "smollm2"], help="NAME or DIR, or NAME:DTYPE")
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    report: dict[str, object] = {"benchmark": "steps"}
    for given in given_targets(args.target):
        figures = measure(*given, args.rounds)
        show(", ".join(given), figures)
        report[":".join(given)] = {name: [value.value, value.low, value.high] for name, value in figures.items()}
        gc.collect()
    print(json.dumps(report | calls.system()))


def given_targets(targets: Iterable[str]) -> list[tuple[str, str]]:
    """Targets with the storage that stands behind their colon, or `auto`."""
    parts = [target.partition(":") for target in targets]
    return [(name, dtype or "auto") for name, _, dtype in parts]


if __name__ == "__main__":
    main()

"""Conversations with three engines of the bundled pair on Ray, by our router and by round robin.

One thread for each engine. Clients ask turn by turn, each when it has the answer before and has waited a little; all
conversations begin with one of six texts. cached: share of prompt tokens that prefix caches had. imbalance: processor
time of the busiest engine, by the mean of all. choose: microseconds of our router's decision, at the 50th and 99th
percentile; choose_cpu: of its thread's processor time, as the process also speaks HTTP. Needs the extras `ray` and
`dev`. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import psutil
import ray
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from aquiline.bench.data.prompts import text_prompts
from aquiline.config import EngineConfig, PairConfig
from aquiline.models.known_pairs import BUNDLED_TARGET
from aquiline.serve.ray import Scale, app
from aquiline.serve.ray.router import PrefixRouter
from aquiline.serve.server_config import ServerConfig
from aquiline.spec.drafting import Chain
from aquiline.text.tokenizer import load_tokenizer

PORT = 8321
NUM_ENGINES, NUM_TEXTS, SIZE = 3, 6, 160
ENGINE = EngineConfig(max_batch=4, max_context=1024, page_size=16, num_pages=512, calibration=False)


class Timed(PrefixRouter):
    """Ours, which writes down how long it takes."""

    def initialize_state(self, *, num_slots: int) -> None:
        super().initialize_state(num_slots=num_slots)
        self.told = open(os.environ["ROUTING_TIMES"], "a", buffering=1)  # noqa: SIM115

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        chosen = await super().choose_replicas(candidate_replicas, pending_request)
        print((time.perf_counter() - began_s) * 1e6, (time.thread_time() - began_cpu_s) * 1e6, file=self.told)
        return chosen


class Turns(RequestRouter):
    """One engine after the other."""

    def initialize_state(self, *, num_slots: int) -> None:
        self.numbers = itertools.count()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        place = next(self.numbers) % len(candidate_replicas)
        return [[candidate_replicas[place]], candidate_replicas]


def engines() -> dict[int, float]:
    """Processor seconds of each replica's engine process."""
    found = dict[int, float]()
    for process in psutil.Process().children(recursive=True):
        above = process.parent()
        if "spawn_main" in " ".join(process.cmdline()) and above is not None and "engines" in " ".join(above.cmdline()):
            found[process.pid] = process.cpu_times().user
    return found


def talk(name: int, url: str, text: str, questions: list[str], num_turns: int) -> list[tuple[int, int, float]]:
    """Prompt tokens, cached tokens and seconds of each turn of a conversation."""
    draw, told, client = random.Random(name), list[tuple[int, int, float]](), httpx.Client(base_url=url, timeout=120)
    for turn in range(num_turns):
        text += questions[(name * num_turns + turn) % len(questions)]
        body = {"prompt": text, "max_tokens": 32, "seed": name, "ignore_eos": True}
        began_s = time.perf_counter()
        reply = client.post("/v1/completions", json=body).raise_for_status().json()
        usage = reply["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        told.append((usage["prompt_tokens"], cached, time.perf_counter() - began_s))
        text += reply["choices"][0]["text"]
        time.sleep(draw.uniform(0, 0.5))
    return told


def measured(rule: type[RequestRouter] | str, num_talks: int, num_turns: int) -> dict[str, Any]:
    """The figures of one router."""
    tokenizer = load_tokenizer(BUNDLED_TARGET)
    assert tokenizer is not None
    texts = [tokenizer.decode(prompt.token_ids) for prompt in text_prompts(SIZE, NUM_TEXTS, tokenizer)]
    questions = [tokenizer.decode(prompt.token_ids) for prompt in text_prompts(30, 4 * NUM_TEXTS, tokenizer)]
    url = f"http://127.0.0.1:{PORT}"
    with mock.patch("aquiline.serve.ray.application.PrefixRouter", rule):
        settings = Scale(NUM_ENGINES, NUM_ENGINES)
        serve.run(
            app(PairConfig("bundled"), ENGINE, ServerConfig(log_level="warning"), drafting=Chain(), scale=settings)
        )
    while httpx.get(f"{url}/ready").status_code != 200:
        time.sleep(0.1)
    before, began_s = engines(), time.perf_counter()
    with ThreadPoolExecutor(num_talks) as pool:
        asked = [
            pool.submit(talk, name, url, texts[name % NUM_TEXTS], questions, num_turns) for name in range(num_talks)
        ]
        turns = np.array([turn for each in asked for turn in each.result()])
    took_s, after = time.perf_counter() - began_s, engines()
    serve.delete("default")
    work = [after[pid] - before[pid] for pid in after]
    return {
        "cached": turns[:, 1].sum() / turns[:, 0].sum(),
        "imbalance": max(work) / float(np.mean(work)),
        "engine_s": sum(work),
        "turn_ms": float(turns[:, 2].mean() * 1e3),
        "seconds": took_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--talks", type=int, default=24)
    parser.add_argument("--turns", type=int, default=12)
    given = parser.parse_args()
    times = Path(tempfile.mkdtemp()) / "times"
    os.environ["ROUTING_TIMES"] = str(times)
    rules: dict[str, type[RequestRouter]] = {"ours": Timed, "round robin": Turns}
    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=80_000_000, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        told = {name: measured(rule, given.talks, given.turns) for name, rule in rules.items()}
    finally:
        serve.shutdown()
        ray.shutdown()
    for name, costs in zip(("choose", "choose_cpu"), np.loadtxt(times).T, strict=True):
        told["ours"] |= {f"{name}_p{share}_us": float(np.percentile(costs, share)) for share in (50, 99)}
    for name, figures in told.items():
        print(name.ljust(12), "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))
    print(json.dumps(told))


if __name__ == "__main__":
    main()

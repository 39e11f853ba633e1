"""Load on the server: time to the first token, time between tokens and tokens per second at several numbers of clients.

Each client sends one request after the other, streamed, over the loopback interface; all clients of a number share out
its requests. Beside it stands the engine alone on the same requests, in a process of its own without HTTP, so that the
share of HTTP is seen; both run in turn in every round. Before what is counted each answers the same requests once, so
that neither meets memory for the first time. Clients, HTTP and the engine share the machine's cores, so the load
generator's own processor time is told too; http_share in the JSON is HTTP's part of the server's, and a run with
--max-tokens 1 tells what a request costs apart from its events. --url measures another OpenAI-compatible server alone;
prompt_tokens in the JSON tell whether both read the same, and --body what a server needs beside OpenAI's fields.
llama-server keeps prompts of earlier rounds unless it is told not to, and ignore_eos forbids end tokens there.

    python benchmarks/serve_load.py --clients 1 4 16 32 --requests 48
    python benchmarks/serve_load.py --target model.gguf --draft DIR --temperature 0.8
    python benchmarks/serve_load.py --url http://127.0.0.1:8080 --clients 1 16 --body '{"cache_prompt": false}'

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from served import Served, posted, serving

MAX_REQUESTS = 1000


@dataclass
class Load:
    """What one number of clients saw. gaps_ms: between two events of a stream, each of which may bring several tokens;
    per_token_ms: a request's time behind its first token, divided by its other tokens."""

    ttft_ms: list[float] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    per_token_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over the whole run."""
        return self.num_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """The table's row."""
        http, engine = self.cpu_s.get("http", 0.0), self.cpu_s.get("engine", 0.0)
        p50, p99 = (lambda values, q=q: float(np.quantile(values, q)) if values else 0.0 for q in (0.5, 0.99))
        return {
            "ttft_ms_p50": p50(self.ttft_ms), "ttft_ms_p99": p99(self.ttft_ms), "itl_ms_p50": p50(self.gaps_ms),
            "itl_ms_p99": p99(self.gaps_ms), "per_token_ms_p50": p50(self.per_token_ms),
            "tokens_per_s": self.tokens_per_s, "tokens": self.num_tokens, "prompt_tokens": self.num_prompt_tokens,
            "cpu_s": self.cpu_s, "http_us_per_token": http / self.num_tokens * 1e6,
            "http_share": http / (http + engine) if engine else 0.0,
        }  # fmt: skip


async def ask(served: Served, body: dict[str, Any], load: Load) -> None:
    """One streamed request. Events are timed as they come. The last one brings no text but the usage, which says how
    many tokens there were."""
    began = time.perf_counter()
    times: list[float] = []
    last = b""
    async with posted(served, "/v1/completions", body) as reply:
        if reply.status != 200:
            raise RuntimeError(f"status {reply.status}: {(await reply.body())[:300]!r}")
        async for event in reply.events():
            if event != b"[DONE]":
                times.append(time.perf_counter())
                last = event
    usage = json.loads(last or b"{}").get("usage")
    if not usage or len(times) < 2:
        raise RuntimeError(f"no text, or no usage behind it; the last event is {last[:300]!r}")
    load.num_prompt_tokens += usage["prompt_tokens"]
    texts, num_tokens = np.array(times[:-1]) * 1e3, usage["completion_tokens"]
    load.num_tokens += num_tokens
    load.ttft_ms.append(float(texts[0]) - began * 1e3)
    load.gaps_ms += np.diff(texts).tolist()
    if num_tokens > 1:
        load.per_token_ms.append(float(texts[-1] - texts[0]) / (num_tokens - 1))


async def run_clients(served: Served, bodies: list[dict[str, Any]], num_clients: int) -> Load:
    """Send all bodies with so many clients."""
    load, waiting = Load(), iter(bodies)

    async def client() -> None:
        for body in waiting:
            await ask(served, body, load)

    before, began = cpu_seconds(served), time.perf_counter()
    await asyncio.gather(*(client() for _ in range(num_clients)))
    load.seconds = time.perf_counter() - began
    load.cpu_s = {name: seconds - before[name] for name, seconds in cpu_seconds(served).items()}
    return load


def cpu_seconds(served: Served) -> dict[str, float]:
    """Processor seconds of the load generator and, for a server of ours, of its two processes."""
    found = {"load": time.process_time()}
    if served.pid is not None:
        for name, process in zip(("http", "engine"), served.processes, strict=True):
            times = process.cpu_times()
            found[name] = times.user + times.system
    return found


def engine_alone(settings: argparse.Namespace, prompts: list[str], num_clients: int) -> float:
    """Tokens per second of the engine on the same requests, at most num_clients at once, in a fresh process."""
    work = {
        "target": settings.target, "draft": settings.draft, "max_batch": num_clients, "prompts": prompts,
        "max_tokens": settings.max_tokens, "temperature": settings.temperature,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__, "--engine-alone"], input=json.dumps(work), capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def run_engine_alone() -> None:
    """The body of that process: requests from stdin, tokens per second to stdout."""
    from aquiline.config import EngineConfig, PairConfig, SamplingParams
    from aquiline.engine.llm import LLM

    work = json.load(sys.stdin)
    llm = LLM.open(PairConfig(target=work["target"], draft=work["draft"]), EngineConfig(max_batch=work["max_batch"]))
    params = [sampling_of(SamplingParams, work, seed) for seed in range(len(work["prompts"]))]
    for salt in ("warm", "a"):
        began = time.perf_counter()
        requests = (llm.request(i, prompt, params[i], cache_salt=salt) for i, prompt in enumerate(work["prompts"]))
        outputs = list(llm.outputs(requests))
    print(sum(len(output.token_ids) for output in outputs) / (time.perf_counter() - began))


def sampling_of(kind: Any, work: dict[str, Any], seed: int) -> Any:
    """The sampling of a request, in both processes the same."""
    return kind(max_tokens=work["max_tokens"], temperature=work["temperature"], seed=seed, ignore_eos=True)


def bodies_of(settings: argparse.Namespace, prompts: list[str], salt: str) -> list[dict[str, Any]]:
    """The requests of a run; its salt keeps it from reading the pages of another."""
    return [
        {"prompt": prompt, "max_tokens": settings.max_tokens, "temperature": settings.temperature, "seed": seed,
         "ignore_eos": True, "cache_salt": salt, "stream": True, "stream_options": {"include_usage": True}}
        for seed, prompt in enumerate(prompts)
    ]  # fmt: skip


def read_prompts(settings: argparse.Namespace, number: int) -> list[str]:
    """So many prompts, again from the first where there are fewer."""
    from pathlib import Path

    from aquiline.models.known_pairs import BUNDLED_PROMPTS
    from aquiline.text.questions import read_questions

    file = Path(settings.prompts) if settings.prompts else BUNDLED_PROMPTS
    known = [question.turns[0][: settings.prompt_chars] for question in read_questions(file)]
    return list(islice(cycle(known), number))


def show(name: str, num_clients: int, figures: dict[str, Any]) -> None:
    """A row of the table."""
    cpu = " ".join(f"{part} {seconds:.1f}" for part, seconds in figures.get("cpu_s", {}).items())
    times = " ".join(f"{figures[key]:9.1f}" for key in ("ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99"))
    print(f"{name:8} {num_clients:3} clients {times} ms {figures['tokens_per_s']:8.1f} tok/s; cpu s: {cpu}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32])
    parser.add_argument("--requests", type=int, default=48, help="requests of each number of clients and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", help="question file; default: the bundled prompts")
    parser.add_argument("--prompt-chars", type=int, default=400)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--draft")
    parser.add_argument("--url", help="measure this server instead")
    parser.add_argument("--body", type=json.loads, default={}, help="JSON: more fields of every request to --url")
    parser.add_argument("--engine-alone", action="store_true", help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.engine_alone:
        run_engine_alone()
        return
    runs = settings.rounds * len(settings.clients)
    total = settings.requests * (runs + 1 if settings.url else 2 * runs)
    if total > MAX_REQUESTS:
        parser.error(f"{total} requests; at most {MAX_REQUESTS} a run")
    rows = measure_url(settings) if settings.url else measure_ours(settings)
    print(json.dumps({"settings": {k: v for k, v in vars(settings).items() if k != "engine_alone"}, "rows": rows}))


def measure_url(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Another server, at every number of clients in turn."""
    where = urlsplit(settings.url)
    served, rows = Served(where.hostname or "", where.port or 80), list[dict[str, Any]]()
    prompts = read_prompts(settings, settings.requests)

    def asked(salt: str) -> list[dict[str, Any]]:
        return [body | settings.body for body in bodies_of(settings, prompts, salt)]

    asyncio.run(run_clients(served, asked("warm"), max(settings.clients)))
    for round_ in range(settings.rounds):
        for num in settings.clients:
            load = asyncio.run(run_clients(served, asked(f"{round_} {num}"), num))
            rows.append({"clients": num, "round": round_, "served": load.figures()})
            show("served", num, rows[-1]["served"])
    return rows


def measure_ours(settings: argparse.Namespace) -> list[dict[str, Any]]:
    """Our server and the engine alone in turn; each number of clients has a server with as many slots."""
    pair = [word for name in ("target", "draft") if (value := vars(settings)[name]) for word in (f"--{name}", value)]
    rows: list[dict[str, Any]] = []
    for num in settings.clients:
        prompts = read_prompts(settings, settings.requests)
        for round_ in range(settings.rounds):
            with serving(*pair, "--max-num-seqs", str(num)) as served:
                asyncio.run(run_clients(served, bodies_of(settings, prompts, "warm"), num))
                load = asyncio.run(run_clients(served, bodies_of(settings, prompts, "a"), num))
            alone = engine_alone(settings, prompts, num)
            rows.append({"clients": num, "round": round_, "served": load.figures(), "engine_tokens_per_s": alone})
            show("served", num, rows[-1]["served"])
            print(f"engine alone {alone:.1f} tok/s; served / alone {load.tokens_per_s / alone:.3f}", flush=True)
    return rows


if __name__ == "__main__":
    main()

"""Chaos: clients of every bad kind at once, and an engine that is killed, for some minutes; then everything is counted.

Random arrivals; clients that leave in the middle of a stream or before a reply; slow readers; malformed bodies, those
that end early, and those of which one field is as large as it may be; prompts that exhaust the pages, so that sequences
are preempted; grammars, new ones and such as take long to compile; the engine process killed. Among them canaries:
requests whose texts, whole or streamed, with speculation or without, some under a grammar, must equal those before the
storm.

Before the storm each of the largest bodies is sent beside one stream, which must not wait for it, and no process may
grow by it. What must hold in the storm: every request ends; canaries are equal; 5xx and broken streams come only from
engines that were killed; only killed engines are replaced; afterwards no request and no page is left; the HTTP process
does not grow.

With --learn the draft learns meanwhile (learning_chaos.py): the trainer is killed too, no file can grow for some
seconds now and then, as on a full disk, and drafts are swapped. Then the folder is read: it must be whole.

    python benchmarks/chaos.py --minutes 1
    python benchmarks/chaos.py --minutes 10 --learn
    python benchmarks/chaos.py --minutes 60 --seed 3

Loopback only, at most --rate requests per second. Exit code 1 if anything did not hold. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import psutil
from chaos_clients import PROMPTS, Storm, act, canary_body, feel_worst, text_of
from learning_chaos import Learning
from served import Served, serving

OPTIONS = (
    "--target", "bundled", "--max-num-seqs", "4", "--num-pages", "40", "--page-size", "16", "--max-model-len", "600",
    "--max-waiting", "12", "--max-stalled-s", "3", "--max-stored-bytes", "4000000", "--check",
)  # fmt: skip
GROWTH = 1.15
"""How much larger the HTTP process may be in the last quarter than in the second one."""


def has_another(served: Served, pid: int) -> bool:
    """Whether another engine process than this one is ready. On a busy machine a server that has not noticed yet that
    its engine was killed calls itself ready."""
    try:
        return any(process.pid != pid for process in served.processes[1:]) and served.is_ready()
    except psutil.Error:  # it ends just now
        return False


async def killer(storm: Storm, every_s: float) -> None:
    """Kill the engine process now and then, and wait for the next one."""
    while True:
        await asyncio.sleep(storm.rng.uniform(0.5, 1.5) * every_s)
        engines = storm.served.processes[1:]
        if engines:
            at = time.monotonic()
            storm.kills.append((at, float("inf")))
            engines[0].kill()
            while not await asyncio.to_thread(has_another, storm.served, engines[0].pid):
                await asyncio.sleep(0.1)
            storm.kills[-1] = (at, time.monotonic())


async def watch(storm: Storm) -> None:
    """Note how large the HTTP process is."""
    while True:
        storm.rss.append((time.monotonic(), storm.served.processes[0].memory_info().rss))
        await asyncio.sleep(1)


async def blow(storm: Storm, settings: argparse.Namespace, learning: Learning | None) -> None:
    """The storm: clients come at random until the time is over, then all are waited for."""
    others = [asyncio.create_task(killer(storm, settings.kill_every)), asyncio.create_task(watch(storm))]
    rate, end, clients = settings.rate, time.monotonic() + settings.minutes * 60, set[asyncio.Task[None]]()
    trouble = None if learning is None else asyncio.create_task(learning.make_trouble(storm.served, storm.rng))
    while time.monotonic() < end:
        await asyncio.sleep(storm.rng.expovariate(rate))
        if len(clients) < 64:
            clients.add(task := asyncio.create_task(act(storm)))
            task.add_done_callback(clients.discard)
    others[0].cancel()
    if trouble is not None:
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
    await asyncio.gather(*clients)
    while not await asyncio.to_thread(storm.served.is_ready):
        await asyncio.sleep(0.1)
    others[1].cancel()


def left_over(storm: Storm) -> dict[str, float]:
    """What is left once nobody asks for anything; waits up to a minute for it to become nothing."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "aquiline:pages_used")
    for _ in range(600):
        found = {name: storm.served.figure(name) for name in names}
        if not any(found.values()):
            break
        time.sleep(0.1)
    return found


def growth(storm: Storm) -> float:
    """The HTTP process's size in the last quarter of the storm over that in the second quarter."""
    sizes = np.array([size for _, size in storm.rss], float)
    quarter = max(1, len(sizes) // 4)
    return float(np.median(sizes[-quarter:]) / np.median(sizes[quarter : 2 * quarter]))


async def know_canaries(storm: Storm) -> None:
    """The first answers, without speculation."""
    names = [f"{place} {temperature}" for place in range(len(PROMPTS)) for temperature in (0.0, 0.9)]
    for name in [*names, "0 0.0 [a-z]{9,30}", "1 0.9 ([a-z]{2,8}_){3,6}"]:
        status, text = await text_of(storm.served, canary_body(name) | {"drafter": "none"})
        assert status == 200, text
        storm.canaries[name] = text


async def check_canaries(storm: Storm) -> int:
    """How many canaries answer as at first after the storm."""
    asked = [await text_of(storm.served, canary_body(name)) for name in storm.canaries]
    return sum(found == (200, text) for found, text in zip(asked, storm.canaries.values(), strict=True))


def main() -> None:
    """Let it blow, then count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second on average")
    parser.add_argument("--kill-every", type=float, default=25.0, help="seconds between kills on average")
    parser.add_argument("--learn", action="store_true", help="let the draft learn; needs the train extra")
    settings = parser.parse_args()
    with contextlib.ExitStack() as stack:
        learning = None
        if settings.learn:
            learning = Learning(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "learnt")
        served = stack.enter_context(serving(*OPTIONS, *([] if learning is None else learning.begin())))
        storm = Storm(served, random.Random(settings.seed))
        asyncio.run(know_canaries(storm))
        felt = asyncio.run(feel_worst(storm))  # first, as a new process grows with whatever it does for the first time
        asyncio.run(blow(storm, settings, learning))
        storm.wrong += [] if learning is None else learning.wrong()
        learnt = None if learning is None else learning.figures()
        left, num_equal = left_over(storm), asyncio.run(check_canaries(storm))
        restarts, preemptions = (
            served.figure(f"{name}_total") for name in ("aquiline:engine_restarts", "vllm:num_preemptions")
        )
    grown = growth(storm)
    storm.wrong += [f"{name} is {value} afterwards" for name, value in left.items() if value]
    if num_equal < len(storm.canaries):
        storm.wrong.append(f"{len(storm.canaries) - num_equal} canaries differ afterwards")
    if restarts != len(storm.kills):
        storm.wrong.append(f"{restarts:.0f} engines were replaced, {len(storm.kills)} were killed")
    if grown > GROWTH:
        storm.wrong.append(f"the HTTP process grew by {grown - 1:.0%}")
    for name, count in sorted(storm.outcomes.items()):
        print(f"{count:7} {name}")
    for text, count in Counter(storm.wrong).most_common(20):
        print(f"WRONG {count} x {text}")
    print(json.dumps({
        "minutes": settings.minutes, "seed": settings.seed, "requests": storm.outcomes.total(),
        "canaries": sum(n for name, n in storm.outcomes.items() if name == "canary: 200"), "kills": len(storm.kills),
        "restarts": restarts, "preemptions": preemptions, "left": left, "growth": grown,
        "rss_mb": storm.rss[-1][1] / 2**20,
        "longest_gap_s": max(each.gap_s for each in felt.values()),
        "most_grown_mb": max(each.grown_bytes for each in felt.values()) / 2**20,
        "learning": learnt, "outcomes": dict(storm.outcomes), "wrong": storm.wrong[:50],
    }))  # fmt: skip
    sys.exit(1 if storm.wrong else 0)


if __name__ == "__main__":
    main()

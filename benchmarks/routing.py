"""Where the turns of conversations go among several engines by four rules, and what prefix caches then have of them.

Engines are the real accounting of pages and prefixes with a clock: a slot computes RATE tokens a second of what the
cache does not have and of the answer, the others wait in order. Conversations take turns; each begins with one of a few
system prompts, and a turn comes a while after the answer before it. Rules:

  round robin   one engine after the other
  two choices   the one of two random engines that has fewer requests
  ray           the rule of Ray's PrefixCacheAffinityRouter with its defaults, over Ray's own tree of characters
  ray, 10       the same with imbalanced_threshold=10, beyond which it takes two choices
  ours          `aquiline.serve.routing`, with a report of each engine every second

hits: cached share of prompt tokens. imbalance: tokens that the busiest engine computed, by the mean of all. first: mean
seconds to the first token. cost: microseconds of a routing decision, digests and bookkeeping included, at the 50th and
99th percentile. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from aquiline.config import SamplingParams
from aquiline.engine.sequence import Request
from aquiline.kv.pool import PagePool
from aquiline.kv.prefix import PrefixCache
from aquiline.serve.ray.replica import MAX_PAGES, OUTPUTS
from aquiline.serve.routing import Affinity, EngineReport, Routed
from aquiline.spec.drafting import NoDraft

RATE = 400.0
"""Tokens that a slot computes in a second."""

PAGE = 64
SLOTS = 8
REPORT_S = 1.0


@dataclass(frozen=True)
class Work:
    """A workload. lengths: tokens of a system prompt, a question and an answer, the latter two from half to twice as
    many; pages: of each engine."""

    name: str
    num_systems: int
    lengths: tuple[int, int, int] = (512, 128, 128)
    num_conversations: int = 90
    num_turns: int = 8
    think_s: float = 12.0
    pages: int = 640


WORKS = (
    Work("several system prompts", 12),
    Work("one system prompt", 1),
    Work("long documents", 30, (3000, 100, 100), pages=1280),
)


@dataclass(eq=False)
class Conversation:
    """What was said so far, and what comes next."""

    name: int
    tokens: list[int]
    num_turns: int = 0


@dataclass(eq=False)
class Turn:
    """A request: the conversation up to its question, and the answer that it will get."""

    name: str
    conversation: Conversation
    prompt: list[int]
    answer: list[int]
    arrived_s: float
    slot: int = -1
    num_cached: int = 0

    def __post_init__(self) -> None:
        self.request = Request(self.name, tuple(self.prompt), SamplingParams(max_tokens=1024, seed=0), NoDraft())


class Engine:
    """Slots, pages and a prefix cache; no model."""

    def __init__(self, work: Work) -> None:
        self.pool = PagePool(work.pages, PAGE, SLOTS, work.pages // SLOTS)
        self.cache = PrefixCache(self.pool)
        self.free, self.waiting, self.running = list(range(SLOTS)), list[Turn](), dict[str, Turn]()
        self.num_computed, self.mean_output, self.numbers = 0, 0.0, itertools.count(1)

    def seat(self, now_s: float) -> Iterator[tuple[float, float, Turn]]:
        """Turns that begin now: the seconds at which they have their first and their last token."""
        while self.free and self.waiting:
            turn = self.waiting.pop(0)
            turn.slot = self.free.pop()
            nodes = self.cache.match(None, turn.prompt)
            self.pool.share(turn.slot, [node.page for node in nodes])
            self.pool.reserve(turn.slot, len(turn.prompt) + len(turn.answer))
            turn.num_cached = len(nodes) * PAGE
            missing = len(turn.prompt) - turn.num_cached
            self.num_computed += missing + len(turn.answer)
            self.running[turn.name] = turn
            yield now_s + missing / RATE, now_s + (missing + len(turn.answer)) / RATE, turn

    def leave(self, turn: Turn) -> None:
        """A turn has ended; its pages stay."""
        tokens, parent = turn.prompt + turn.answer, None
        for index in range(len(tokens) // PAGE):
            page = tokens[index * PAGE : (index + 1) * PAGE]
            parent = self.cache.publish(None, turn.slot, parent, index, page, False, False)
            assert parent is not None
        self.pool.release(turn.slot)
        self.free.append(turn.slot)
        del self.running[turn.name]
        self.mean_output += (len(turn.answer) - self.mean_output) / (OUTPUTS if self.mean_output else 1)

    def report(self) -> EngineReport:
        expected = round(self.mean_output)
        load = sum(len(turn.prompt) + expected for turn in self.waiting) + len(self.running) * expected
        return EngineReport(next(self.numbers), load, self.mean_output, frozenset(self.cache.digests(MAX_PAGES)))


class Rule(Protocol):
    """Chooses an engine for a turn, and hears of what happens."""

    def choose(self, turn: Turn, queues: list[int]) -> int: ...

    def end(self, turn: Turn, engine: int) -> None: ...

    def report(self, engines: list[Engine]) -> None: ...


class RoundRobin:
    def __init__(self, num_engines: int) -> None:
        self.next = itertools.cycle(range(num_engines))

    def choose(self, turn: Turn, queues: list[int]) -> int:
        return next(self.next)

    def end(self, turn: Turn, engine: int) -> None: ...

    def report(self, engines: list[Engine]) -> None: ...


class TwoChoices(RoundRobin):
    def __init__(self, num_engines: int) -> None:
        self.draw = random.Random(0)

    def choose(self, turn: Turn, queues: list[int]) -> int:
        return min(self.draw.sample(range(len(queues)), 2), key=queues.__getitem__)


class RaysRule(TwoChoices):
    """Prompts alone are inserted, and nothing is evicted. imbalanced: requests by which the longest queue may exceed
    the shortest; by default load is not looked at."""

    def __init__(self, num_engines: int, imbalanced: float = math.inf) -> None:
        super().__init__(num_engines)
        self.imbalanced = imbalanced
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        self.tree = PrefixTree()
        self.names = [str(number) for number in range(num_engines)]
        self.tree.add_tenants(self.names, 0.0)

    def choose(self, turn: Turn, queues: list[int]) -> int:
        text = "".join(f"{token:04x}" for token in turn.prompt)
        matched, tenants = self.tree.prefix_match(text, self.names)
        if len(matched) / len(text) < 0.1:
            tenants = self.tree.get_smallest_tenants()
        chosen = min((int(tenant) for tenant in tenants or self.names), key=queues.__getitem__)
        if max(queues) - min(queues) > self.imbalanced:
            chosen = super().choose(turn, queues)
        self.tree.insert(text, str(chosen), turn.arrived_s)
        return chosen


class Ours(RoundRobin):
    def __init__(self, num_engines: int) -> None:
        self.affinity = Affinity[int](SLOTS, random.Random(0))
        self.affinity.update(dict.fromkeys(range(num_engines)))

    def choose(self, turn: Turn, queues: list[int]) -> int:
        routed = Routed.of(turn.request, PAGE)
        chosen = self.affinity.rank(routed)[0][0]
        self.affinity.place(turn.name, routed, chosen)
        return chosen

    def end(self, turn: Turn, engine: int) -> None:
        self.affinity.records[engine].end(turn.name)

    def report(self, engines: list[Engine]) -> None:
        self.affinity.update({place: engine.report() for place, engine in enumerate(engines)})


RULES: dict[str, Callable[[int], Rule]] = {
    "round robin": RoundRobin, "two choices": TwoChoices, "ray": RaysRule,
    "ray, 10": partial(RaysRule, imbalanced=10), "ours": Ours,
}  # fmt: skip


@dataclass(eq=False)
class Outcome:
    """What a run has shown."""

    num_prompt: int = 0
    num_cached: int = 0
    firsts_s: list[float] = field(default_factory=list)
    costs_us: list[float] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        return {
            "hits": self.num_cached / self.num_prompt,
            "imbalance": max(self.computed) / float(np.mean(self.computed)),
            "first_s": float(np.mean(self.firsts_s)),
            "cost_p50_us": float(np.percentile(self.costs_us, 50)),
            "cost_p99_us": float(np.percentile(self.costs_us, 99)),
        }


class Run:
    """One workload under one rule, event by event."""

    def __init__(self, work: Work, rule: Rule, num_engines: int, seed: int) -> None:
        self.work, self.rule, self.draw = work, rule, random.Random(seed)
        self.engines = [Engine(work) for _ in range(num_engines)]
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order, self.outcome = itertools.count(), Outcome()

    def at(self, seconds: float, what: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (seconds, next(self.order), what))

    def words(self, mean: int) -> list[int]:
        return [self.draw.randrange(2**16) for _ in range(self.draw.randint(mean // 2, 2 * mean))]

    def run(self) -> Outcome:
        work = self.work
        systems = [[self.draw.randrange(2**16) for _ in range(work.lengths[0])] for _ in range(work.num_systems)]
        for name in range(work.num_conversations):
            talk = Conversation(name, list(systems[name % work.num_systems]))
            self.at(self.draw.uniform(0, 4 * work.think_s), lambda now_s, talk=talk: self.ask(talk, now_s))
        self.at(REPORT_S, self.report)
        while self.events:
            now_s, _, what = heapq.heappop(self.events)
            what(now_s)
        self.outcome.computed = [engine.num_computed for engine in self.engines]
        return self.outcome

    def report(self, now_s: float) -> None:
        self.rule.report(self.engines)
        if self.events:
            self.at(now_s + REPORT_S, self.report)

    def ask(self, talk: Conversation, now_s: float) -> None:
        talk.num_turns += 1
        talk.tokens += self.words(self.work.lengths[1])
        turn = Turn(f"{talk.name}-{talk.num_turns}", talk, list(talk.tokens), self.words(self.work.lengths[2]), now_s)
        queues = [len(engine.waiting) + len(engine.running) for engine in self.engines]
        began_s = time.perf_counter()
        place = self.rule.choose(turn, queues)
        self.outcome.costs_us.append((time.perf_counter() - began_s) * 1e6)
        self.engines[place].waiting.append(turn)
        self.seat(place, now_s)

    def seat(self, place: int, now_s: float) -> None:
        for first_s, last_s, turn in self.engines[place].seat(now_s):
            self.outcome.num_prompt += len(turn.prompt)
            self.outcome.num_cached += turn.num_cached
            self.outcome.firsts_s.append(first_s - turn.arrived_s)
            self.at(last_s, lambda now_s, turn=turn: self.end(place, turn, now_s))

    def end(self, place: int, turn: Turn, now_s: float) -> None:
        self.engines[place].leave(turn)
        self.rule.end(turn, place)
        talk = turn.conversation
        talk.tokens += turn.answer
        if talk.num_turns < self.work.num_turns:
            self.at(now_s + self.draw.expovariate(1 / self.work.think_s), lambda now_s: self.ask(talk, now_s))
        self.seat(place, now_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    told = list[dict[str, object]]()
    for work in WORKS:
        print(f"\n{work.name}, {given.engines} engines")
        print(f"{'rule':12} {'hits':>6} {'imbalance':>10} {'first s':>8} {'cost p50':>9} {'p99 us':>8}")
        for name, rule in RULES.items():
            runs = [Run(work, rule(given.engines), given.engines, seed).run().figures() for seed in range(given.seeds)]
            mean = {key: float(np.mean([run[key] for run in runs])) for key in runs[0]}
            told.append({"work": work.name, "rule": name, **mean})
            print(
                f"{name:12} {mean['hits']:6.3f} {mean['imbalance']:10.2f} {mean['first_s']:8.2f} "
                f"{mean['cost_p50_us']:9.0f} {mean['cost_p99_us']:8.0f}"
            )
    print(json.dumps(told))


if __name__ == "__main__":
    main()

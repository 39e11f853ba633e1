"""Which of several engines gets a request: the one with the fewest tokens to compute up to the request's end.

Tokens are the only currency: those of this request's prompt that an engine's prefix cache does not have, and those that
each slot of the engine has still to compute for other requests. So a request goes where its prompt is cached, unless
that engine has more to do than the cached tokens save. Engines are names here: nothing of Ray, sockets or processes is
known.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from aquiline.engine.sequence import Request
from aquiline.kv.prefix import page_digests

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Routed:
    """A request and what decides where it goes. digests: of its prompt's pages; page_size: their tokens."""

    request: Request
    digests: tuple[int, ...]
    page_size: int

    @classmethod
    def of(cls, request: Request, page_size: int) -> Routed:
        """The same request with its prompt's digests; none where engines cache no pages: page_size 0."""
        digests = page_digests(request.cache_salt, request.prompt_ids, page_size) if page_size else []
        return cls(request, tuple(digests), page_size)


class EngineReport(NamedTuple):
    """What an engine tells of itself. number: of the report, from 1 on; load: tokens that it has still to compute;
    mean_output: new tokens of a request of late, 0 before the first one has ended; pages: digests of cached pages."""

    number: int
    load: int
    mean_output: float
    pages: frozenset[int]


UNKNOWN = EngineReport(0, 0, 0.0, frozenset())
"""Of an engine that has told nothing yet."""


class Charge(NamedTuple):
    """What a request adds to an engine: tokens to compute, and pages that will be cached."""

    num_tokens: int
    digests: tuple[int, ...]


@dataclass(eq=False)
class EngineRecord:
    """What is known of one engine: its last report, and what was routed to it since.

    A page counts as cached from the moment at which a request with it is routed there; it stops doing so in the second
    report after that request's end, unless the report names it. others: load of requests that were routed elsewhere
    than here, as of the report."""

    report: EngineReport = UNKNOWN
    running: dict[str, Charge] = field(default_factory=dict)
    load: int = 0
    others: int = 0
    _routed: Counter[int] = field(default_factory=Counter)
    _ended: list[Charge] = field(default_factory=list)
    _ended_before: list[Charge] = field(default_factory=list)

    def num_cached(self, digests: Sequence[int]) -> int:
        """The number of pages, of those that a prompt begins with, that the engine has. No page is cached without those
        before it."""
        known, routed = self.report.pages, self._routed
        return bisect_left(digests, True, key=lambda digest: digest not in known and digest not in routed)

    def take(self, report: EngineReport) -> None:
        """A report has come, perhaps once more."""
        if report.number == self.report.number:
            return
        self.report, self.others = report, max(0, report.load - self.load)
        for charge in self._ended_before:
            self._forget(charge)
        self._ended_before, self._ended = self._ended, []

    def begin(self, name: str, routed: Routed) -> None:
        """A request goes to the engine."""
        request, mean = routed.request, self.report.mean_output
        new = request.sampling.max_tokens if mean == 0 else min(request.sampling.max_tokens, round(mean))
        num_cached = self.num_cached(routed.digests) * routed.page_size
        self.running[name] = charge = Charge(len(request.prompt_ids) - num_cached + new, routed.digests)
        self._routed.update(charge.digests)
        self.load += charge.num_tokens

    def end(self, name: str) -> None:
        """A request has ended, however it did; one that is not known is left alone."""
        if (charge := self.running.pop(name, None)) is not None:
            self.load -= charge.num_tokens
            self._ended.append(charge)

    def withdraw(self, name: str) -> None:
        """A request does not go to the engine after all, if it was to."""
        if (charge := self.running.pop(name, None)) is not None:
            self.load -= charge.num_tokens
            self._forget(charge)

    def _forget(self, charge: Charge) -> None:
        for digest in charge.digests:
            if self._routed[digest] == 1:
                del self._routed[digest]
            else:
                self._routed[digest] -= 1


class Affinity(Generic[K]):
    """Ranks engines of num_slots slots each for requests. records: of the engines that take requests, by name."""

    def __init__(self, num_slots: int, draw: random.Random) -> None:
        self.records: dict[K, EngineRecord] = {}
        self.num_slots = num_slots
        self._draw = draw

    def update(self, reports: Mapping[K, EngineReport | None]) -> None:
        """These engines, and no others, take requests; None has not reported yet."""
        self.records = {name: self.records.get(name) or EngineRecord() for name in reports}
        for name, report in reports.items():
            if report is not None:
                self.records[name].take(report)

    def place(self, name: str, routed: Routed, engine: K) -> None:
        """A request goes to this engine, and to no other where it was to go before."""
        self.withdraw(name)
        if (record := self.records.get(engine)) is not None:
            record.begin(name, routed)

    def withdraw(self, name: str) -> None:
        """A request goes nowhere."""
        for record in self.records.values():
            record.withdraw(name)

    def rank(self, routed: Routed) -> list[list[K]]:
        """Engines for a request, the best first, those of the last list as good as each other.

        Looked at are two at random, so that many routers with one view of things do not all choose the same, and the
        one that has most of the prompt."""
        names = list(self.records)
        looked_at = self._draw.sample(names, min(2, len(names)))
        num_cached = {name: record.num_cached(routed.digests) for name, record in self.records.items()}
        if any(num_cached.values()) and (longest := max(names, key=num_cached.__getitem__)) not in looked_at:
            looked_at.append(longest)

        def num_tokens(name: K) -> float:  # up to the request's end, less what is the same everywhere
            record = self.records[name]
            return (record.load + record.others) / self.num_slots - num_cached[name] * routed.page_size

        best = sorted(looked_at, key=num_tokens)
        return [*([name] for name in best), [name for name in names if name not in best]]

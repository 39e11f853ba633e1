"""Measure a CostTable on this machine, by short steps of a separate backend over made-up tokens and keys.

A table depends on the models' geometry, their storage, the arithmetic, the machine and its threads. It is kept in the
cache directory under a hash of all of these, so that it is measured once. One that was measured while others used the
processors is measured again at the next starts, MAX_TRIES times in all, and the least disturbed one is kept.

Beside it lies how often the pair's drafts were right, for the next run to begin with.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import psutil

from aquiline.backends.base import Admit, Backend, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.checks import parse_json
from aquiline.config import MAX_DEPTH, SamplingParams, cache_directory
from aquiline.engine.control.acceptance import Pool, new_pools
from aquiline.engine.control.costs import MIN_MS, CostTable, ms_at, times_by_rows
from aquiline.engine.control.rivals import Rivals
from aquiline.engine.model import LoadedModels
from aquiline.spec.drafting import Chain, NoDraft, Proposal

logger = logging.getLogger(__name__)

FILE_VERSION = 7
"""Version of the file's format and of the measurement."""

MAX_OTHERS, MAX_TRIES = 0.1, 3
"""Share of the processors that others may use while a table is measured, and measurements after which the least
disturbed table stays."""

MEASURED_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128)
MEASURED_SEQUENCES = (1, 2, 4, 8, 16, 32)
REPEATS, WARMING_STEPS = 5, 5
"""How often each is measured, and the steps of one row before each round: behind a step of many rows the next four find
less of a small model in the caches, and take up to 1.7 times as long."""

MAX_SECONDS = 4.0
"""After this time the larger numbers of rows are left out. A large model has few points and a straight line."""

BYTES_PER_MS, CHEAP_ROWS = 40e6, 8
"""Assumptions of an estimated table: bytes read per millisecond, and the number of rows that cost little more than
one."""

PAGE_SIZE, PAGES_PER_SLOT, SLOTS = 16, 24, 32
SHORT_CONTEXT, LONG_CONTEXT = 32, 2048
"""Keys of a sequence in the steps that measure rows, and in those that measure the cost of keys. A model that was built
for fewer positions computes these too."""

LONG_KV_BYTES, MAX_LONG_SEQUENCES = 160e6, 8
"""Bytes of the keys and values of all long sequences, more than caches hold, and the greatest number of sequences."""

LONG_ROWS = 8
CHAIN_LEVELS = 5
"""Levels of the longer of the two chains that are measured. It takes CHAIN_LEVELS - 1 passes more than the other."""


def cost_table(models: LoadedModels, is_measured: bool) -> CostTable:
    """The table of this pair on this machine: read from the cache file, or measured and written to it. If nothing may
    be measured, an estimate from the bytes of the weights."""
    if not is_measured:
        return estimated_table(models.weight_bytes, models.draft_config is not None)
    file, kept = cache_directory() / f"costs-{_key(models)}.json", None
    try:
        kept = _read(parse_json(file.read_bytes()), models.draft_config is not None)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        logger.warning("%s: broken (%s); measuring again", file, error)
    if kept is not None and (kept.others <= MAX_OTHERS or kept.tries >= MAX_TRIES):
        return kept.table
    watch = _Watch()
    found = _Kept(measured_table(models), watch.others(), kept.tries + 1 if kept else 1)
    if found.others > MAX_OTHERS and found.tries < MAX_TRIES:
        logger.warning(
            "step times were measured while others used %.0f %% of the processors; the next start measures again",
            100 * found.others,
        )
    if kept is not None and kept.others < found.others:
        found = kept._replace(tries=found.tries)
    try:
        _write(file, json.dumps(asdict(found.table) | {"others": found.others, "tries": found.tries}))
    except OSError as error:
        logger.warning("%s: cannot be written (%s); the next start measures again", file, error)
    return found.table


def known_chances(file: Path) -> tuple[list[Pool], Rivals]:
    """How often a pair's drafts are right, and what drafting has brought at each load, as earlier runs kept it."""
    pools, rivals = new_pools(), Rivals()
    try:
        kept = parse_json(file.read_bytes())
        for pool, counts in zip(pools, kept["pools"], strict=True):
            pool.begin_with(counts)
        rivals.begin_with(kept["rivals"])
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        logger.warning("%s: broken (%s); learning again", file, error)
        return new_pools(), Rivals()
    return pools, rivals


def keep_chances(file: Path, pools: Sequence[Pool], rivals: Rivals) -> None:
    """Keep what was learnt for the next run. It is lost where nothing can be written."""
    with suppress(OSError):
        _write(file, json.dumps({"pools": [pool.counts() for pool in pools], "rivals": rivals.kept()}))


def chances_file(models: LoadedModels) -> Path:
    """Where it is kept how often this pair's drafts are right, and what drafting brings."""
    return cache_directory() / f"chances-{_key(models)}.json"


class _Kept(NamedTuple):
    """A table of the cache. others: the share of the processors that others used meanwhile; tries: measurements."""

    table: CostTable
    others: float
    tries: int


class _Watch:
    """Tells how much of the processors that this process may run on others use from now on."""

    LEAST_S = 0.1  # processor times are counted in hundredths of a second

    def __init__(self) -> None:
        psutil.cpu_percent(percpu=True)  # which begins to count
        self._began, self._own = time.perf_counter(), time.process_time()

    def others(self) -> float:
        """The share that others used, a virtual machine's host among them; 0 if too little time has passed."""
        took, own = time.perf_counter() - self._began, time.process_time() - self._own
        busy = psutil.cpu_percent(percpu=True)
        usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(len(busy)))
        shares = [busy[cpu] / 100 for cpu in usable if cpu < len(busy)]
        return max(0.0, mean(shares) - own / took / len(shares)) if shares and took >= self.LEAST_S else 0.0


def measured_table(models: LoadedModels) -> CostTable:
    """The table, measured now."""
    bytes_each = sum(models.pair.kv_bytes_per_token()) * LONG_CONTEXT
    num_long = max(1, min(MAX_LONG_SEQUENCES, int(LONG_KV_BYTES / bytes_each)))
    num_pages = SLOTS * PAGES_PER_SLOT + num_long * LONG_CONTEXT // PAGE_SIZE
    sizes = Sizes(SLOTS, num_pages, PAGE_SIZE, LONG_CONTEXT // PAGE_SIZE, 4 * SHORT_CONTEXT)
    backend = models.pair.open(sizes)
    try:
        return _Measurement(models, backend, num_long).table()
    finally:
        backend.close()


def estimated_table(weight_bytes: int, has_draft: bool) -> CostTable:
    """The table of a machine that reads BYTES_PER_MS bytes a millisecond, on which computing CHEAP_ROWS rows takes as
    long as reading the weights. A draft's pass takes a twentieth of a forward. Some hundreds of real steps correct the
    table."""
    read_ms = max(1, weight_bytes) / BYTES_PER_MS
    rows = times_by_rows([(1, read_ms), (CHEAP_ROWS, read_ms * 1.1), (2 * CHEAP_ROWS, read_ms * 2.0)])
    share = 0.05 if has_draft else 0.0
    return CostTable(rows, tuple(2 * share * ms for ms in rows), tuple(share * ms for ms in rows))


class _StepTimes(NamedTuple):
    """Milliseconds of a step: of all of it, and of its drafting."""

    whole: float
    draft: float


class _Measurement:
    """Sequences in the slots of a backend, of made-up tokens. Their keys count as cached and hold arbitrary values."""

    def __init__(self, models: LoadedModels, backend: Backend, num_long: int) -> None:
        self.backend, self.has_draft = backend, models.draft_config is not None
        self.vocab, self.num_long, self.num_layers = models.vocab_size, num_long, models.target_config.num_layers
        self.by_rows = times_by_rows([(1, 0.0)])  # milliseconds of forwards, once they are measured
        self.reports_times = True
        self.lengths, self.num_seated = [0] * SLOTS, 0  # num_seated: slots, from the first, that hold long sequences
        self.deadline = time.perf_counter() + MAX_SECONDS
        for slot in range(SLOTS):
            self._seat(slot, SHORT_CONTEXT, PAGES_PER_SLOT, slot * PAGES_PER_SLOT)

    def table(self) -> CostTable:
        verify = dict[int, float]()
        # Each round measures all numbers of rows, so that a short disturbance does not hit every measurement of one.
        for number in range(REPEATS):
            for _ in range(WARMING_STEPS):
                self._verify(1)
            for rows in MEASURED_ROWS:
                is_late = len(verify) > 4 and time.perf_counter() > self.deadline - MAX_SECONDS / 2
                if rows not in verify and (number or is_late):
                    break
                verify[rows] = min(verify.get(rows, math.inf), self._verify(rows).whole)
        self.by_rows = times_by_rows(sorted(verify.items()))
        first, deeper = [(0, 0.0)], [(0, 0.0)]
        for count in MEASURED_SEQUENCES if self.has_draft else ():
            if len(first) > 2 and time.perf_counter() > self.deadline:
                break
            one, deep = (
                self._best(self._chain, count, 1).draft,
                self._best(self._chain, count, CHAIN_LEVELS).draft,
            )
            first.append((count, one))
            deeper.append((count, max(0.0, deep - one) / (CHAIN_LEVELS - 1)))
        if not self.has_draft:
            first = deeper = [*first, (1, 0.0)]
        return CostTable(self.by_rows, times_by_rows(first[1:]), times_by_rows(deeper[1:]), *self._keys())

    def _keys(self) -> tuple[tuple[tuple[float, float], ...], float, float]:
        """The times that keys add: to a forward by their number, to each row that reads them, and to a pass of the
        draft."""
        near = self._best(self._chain, 1, CHAIN_LEVELS).draft if self.has_draft else 0.0
        by_rows, num_pages = self.by_rows, LONG_CONTEXT // PAGE_SIZE
        num_keys = LONG_CONTEXT - 4 * MAX_DEPTH  # the rest is for the tokens that these sequences write
        for slot in range(self.num_long):
            self._seat(slot, num_keys, num_pages, SLOTS * PAGES_PER_SLOT + slot * num_pages)
        self.num_seated = self.num_long
        one, several = (self._best(self._one, rows).whole - by_rows[rows] for rows in (1, LONG_ROWS))
        far = self._best(self._chain, 1, CHAIN_LEVELS).draft if self.has_draft else 0.0
        key_row = max(0.0, (several - one) / (LONG_ROWS - 1) / num_keys)
        points: list[tuple[float, float]] = []
        for count in sorted({1, self.num_long}):
            more = one if count == 1 else self._best(self._each, count).whole - by_rows[count]
            keys = float(count * num_keys)
            points.append((keys, max(points[-1][1] if points else 0.0, more - key_row * keys)))
        if not self.reports_times:  # the difference also has the time that keys add to the forward
            far -= one + CHAIN_LEVELS * key_row * num_keys
        return tuple(points), key_row, max(0.0, far - near) / CHAIN_LEVELS / num_keys

    def _verify(self, rows: int) -> _StepTimes:
        """A step of that number of rows: a few sequences with several rows each, like chains."""
        count = max(-(-rows // (MAX_DEPTH // 2)), min(rows // 4, SLOTS), 1)
        sizes = [rows // count + (i < rows % count) for i in range(count)]
        return self._step([self._decode(slot, size) for slot, size in enumerate(sizes)])

    def _one(self, rows: int) -> _StepTimes:
        return self._step([self._decode(0, rows)])

    def _each(self, count: int) -> _StepTimes:
        return self._step([self._decode(slot, 1) for slot in range(count)])

    def _chain(self, count: int, length: int) -> _StepTimes:
        return self._step([Decode(slot, Chain(length)) for slot in range(count)])

    def _decode(self, slot: int, rows: int) -> Decode:
        tokens = tuple((7 * slot + 3 * i + self.lengths[slot]) % self.vocab for i in range(rows - 1))
        return Decode(slot, NoDraft(), Proposal(tokens))

    @staticmethod
    def _best(measure: Callable[..., _StepTimes], *args: int) -> _StepTimes:
        """The fastest of some steps, each part by itself: other processes can only add time."""
        steps = [measure(*args) for _ in range(REPEATS)]
        return _StepTimes(min(step.whole for step in steps), min(step.draft for step in steps))

    def _step(self, decodes: list[Decode]) -> _StepTimes:
        for decode in decodes:  # a slot that is nearly full starts again
            is_full = self.lengths[decode.slot] + 2 * MAX_DEPTH > PAGES_PER_SLOT * PAGE_SIZE
            if is_full and decode.slot >= self.num_seated:
                self._seat(decode.slot, SHORT_CONTEXT, PAGES_PER_SLOT, decode.slot * PAGES_PER_SLOT)
        began = time.perf_counter()
        output = self.backend.step(StepInput(tuple(decodes))).read()
        took = time.perf_counter() - began
        for decode, decoded in zip(decodes, output.decodes, strict=True):
            self.lengths[decode.slot] += len(decoded.kept)
        if output.seconds is not None:
            return _StepTimes(sum(output.seconds.values()) * 1e3, output.seconds["draft"] * 1e3)
        self.reports_times = False  # the time of drafting is the step's time beyond a forward of its rows
        num_rows = sum(1 + decoded.num_drafted for decoded in output.decodes)
        # A pass takes no less than one of the target's layers, head included, however disturbed those forwards were.
        num_passes = max(decoded.num_drafted for decoded in output.decodes)
        least = num_passes * self.by_rows[1] / (self.num_layers + 1)
        return _StepTimes(took * 1e3, max(least, took * 1e3 - ms_at(self.by_rows, num_rows)))

    def _seat(self, slot: int, num_keys: int, num_pages: int, first_page: int) -> None:
        """Put a sequence of num_keys cached tokens and one more into a slot, with its keys in pages from first_page
        on."""
        tokens = tuple((slot + 5 * i) % self.vocab for i in range(num_keys + 1))
        admit = Admit(slot, tokens, len(tokens), SamplingParams(seed=slot), num_hit=num_keys, drafts=self.has_draft,
                      draft_end=num_keys)  # fmt: skip
        pages = Pages(slot, 0, tuple(range(first_page, first_page + num_pages)))
        chunk = Chunk(slot, num_keys, num_keys + 1, is_last=True, draws=True)
        self.backend.step(StepInput(chunks=(chunk,), admits=(admit,), pages=(pages,))).read()
        self.lengths[slot] = num_keys + 2


def _key(models: LoadedModels) -> str:
    draft = models.draft_config
    what = {
        "version": FILE_VERSION, "target": asdict(models.target_config),
        "draft": None if draft is None else asdict(draft),
        "system": models.system(), "affinity": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:24]


def _read(fields: dict[str, Any], has_draft: bool) -> _Kept:
    """A table from the cache. Raises ValueError, TypeError, KeyError or OverflowError for anything else."""
    verify, first, deeper = (tuple(map(float, fields[name])) for name in ("verify", "first", "deeper"))
    keys = tuple((float(number), float(ms)) for number, ms in fields["keys"])
    table = CostTable(verify, first, deeper, keys, float(fields["key_row_ms"]), float(fields["draft_key_ms"]))
    if has_draft and table.first[1] < MIN_MS:
        raise ValueError(f"first={table.first[1]} ms: drafting takes time")
    return _Kept(table, float(fields["others"]), int(fields["tries"]))


def _write(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as temporary:
        temporary.write(text)
    Path(temporary.name).replace(file)

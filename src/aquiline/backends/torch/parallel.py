"""A pair that several processes share, one rank each: what starts them, what they are told, how they end.

Rank 0 is the process of the engine. It sends every order, a call of its backend with its arguments, to the other ranks,
and all carry it out on their share of the weights and of the keys. What they draw is the same everywhere, so rank 0's
outcome counts and nothing is sent back. The order of a step also says how many outcomes rank 0 has read since the last,
because reading one tells a backend how long its slots have become.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import is_nccl_available

from aquiline.backends.base import (
    Backend,
    Drafts,
    Pending,
    RowEdits,
    Scored,
    Sizes,
    StepInput,
    StepOutput,
    TokenMasks,
)
from aquiline.backends.choose import LoadPair
from aquiline.backends.torch.ranks import LinkedRanks, Parted
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.errors import RankError
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.models.shares import Share, refuse_ranks
from aquiline.spec.tree import DraftTree
from aquiline.types import Int32

START_S, LIMIT_S, GRACE_S = 120.0, 7.0, 1.5
"""Seconds that a rank has to start and to load when rank 0 has done so; that ranks wait for each other in a step; that
those which have waited so long have to end, before one that has not is taken to hang."""
GAVE_UP = 3
"""Exit code of a rank that has waited for another in vain."""
HOST = "127.0.0.1"


@dataclass(frozen=True)
class RankStart:
    """What the process of a rank is started with. port: of rank 0's store; threads: as many as rank 0's torch has,
    since torch adds up some products in another order with more threads; settings: dtype, kv_dtype and so on of
    TorchPair."""

    share: Share
    port: int
    threads: int
    load: LoadPair
    settings: dict[str, Any]


class Team:
    """The processes of the other ranks, by rank, and rank 0's link to them."""

    def __init__(self, shares: list[Share], load: LoadPair, settings: dict[str, Any]) -> None:
        """shares: of all ranks. Raises RankError if a rank does not start."""
        self.store, self.error = TCPStore(HOST, 0, is_master=True, wait_for_workers=False), ""
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._end = weakref.finalize(self, end_processes, self.processes)
        code = "from aquiline.backends.torch.parallel import follow; follow()"
        for rank, share in enumerate(shares[1:], 1):
            opening = pickle.dumps(RankStart(share, self.store.port, torch.get_num_threads(), load, settings))
            process = self.processes[rank] = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:  # a rank that is dead is named below
                process.stdin.write(opening)
        self.wait("started")
        with self.together():
            self.ranks = linked(shares[0], self.store, settings["device"])

    def wait(self, what: str) -> None:
        """Wait until every rank has `started` or `loaded`. Raises RankError, and ends all, if one has not in time."""
        deadline = time.monotonic() + START_S
        while late := [rank for rank in self.processes if not self.store.check([f"{what} {rank}"])]:
            dead = [rank for rank in late if self.processes[rank].poll() is not None]
            if dead or time.monotonic() > deadline:
                why = self._of_dead(dead) if dead else f"{named(late)} has not {what} within {START_S:g} s"
                self._fail(why)
            time.sleep(0.02)

    def tell(self, *order: object) -> None:
        """Send an order to all ranks."""
        self.ranks.tell(order)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Do what needs the other ranks. Raises RankError, and ends all, if one of them dies or hangs meanwhile."""
        if self.error:
            raise RankError(self.error)
        try:
            yield
        except Parted as error:
            self._fail(self._reason(error), error)

    def close(self) -> None:
        """End the processes and wait for their end. Closing twice does nothing."""
        if not self.error and self._end.alive:
            with contextlib.suppress(Parted):
                self.tell("end")
                for process in self.processes.values():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(GRACE_S)
        self.error = self.error or "the ranks of this pair were closed; load it again"
        self._end()

    def _reason(self, error: Parted) -> str:
        """Which rank failed: one that died, else one that still runs when the others have waited in vain."""
        deadline = time.monotonic() + GRACE_S
        while True:
            codes = {rank: process.poll() for rank, process in self.processes.items()}
            dead = [rank for rank, code in codes.items() if code not in (None, GAVE_UP)]
            running = [rank for rank, code in codes.items() if code is None]
            if dead:
                return self._of_dead(dead)
            if not running:
                return f"rank 0 kept the others waiting for more than {LIMIT_S:g} s ({error})"
            if time.monotonic() > deadline:
                return f"{named(running)} has not answered for {LIMIT_S + GRACE_S:g} s ({error})"
            time.sleep(0.02)

    def _of_dead(self, ranks: list[int]) -> str:
        codes = ", ".join(str(self.processes[rank].returncode) for rank in ranks)
        return f"{named(ranks)} has died (exit code {codes}); see its output"

    def _fail(self, why: str, error: Exception | None = None) -> None:
        self.error = f"{why}; all ranks were ended: load the pair again"
        self._end()
        raise RankError(self.error) from error


def named(ranks: list[int]) -> str:
    """Ranks in words."""
    return " and ".join(f"rank {rank}" for rank in ranks)


def end_processes(processes: dict[int, subprocess.Popen[bytes]]) -> None:
    """Kill the processes that still run, and wait for their end."""
    for process in processes.values():
        process.kill()
        process.wait()


def linked(share: Share, store: TCPStore, device: str) -> LinkedRanks:
    """A rank's link to the others, once all are there."""
    idle = timedelta(days=365) if share.rank else timedelta(seconds=LIMIT_S)
    return LinkedRanks(share, store, timedelta(seconds=LIMIT_S), idle, device)


def refuse_device(num_ranks: int, device: str) -> None:
    """Raises ValueError unless every rank has a device: the CPU, or a GPU of its own, linked by NCCL."""
    has_nccl, num_gpus = is_nccl_available(), torch.cuda.device_count()
    if device not in ("cpu", "torch") and (device != "cuda" or num_gpus < num_ranks or not has_nccl):
        raise ValueError(
            f"tensor_parallel_size={num_ranks}, device={device!r}: ranks run on CPUs with device='torch', or on a GPU "
            f"each with device='cuda'; torch sees {num_gpus} GPUs here and {'has' if has_nccl else 'lacks'} NCCL"
        )


class ParallelPair(TorchPair):
    """Rank 0's part of a pair that several processes share. In the mode "gather" it gives the bits that one rank gives
    with as many threads, on CPUs. Ranks with a GPU each were never run."""

    def __init__(
        self, shares: list[Share], load: LoadPair, target: ModelWeights, draft: DraftWeights | None,
        settings: dict[str, Any],
    ) -> None:  # fmt: skip
        """shares: of all ranks. Raises ValueError for models that they cannot share, RankError if a rank fails."""
        refuse_device(len(shares), settings["device"])
        refuse_ranks(len(shares), target, draft)
        self.team = Team(shares, load, settings)
        try:
            TorchPair.__init__(self, target, draft, **settings, ranks=self.team.ranks)
            self.team.wait("loaded")
        except BaseException:
            self.team.close()
            raise
        self._num_opened = 0

    def open(self, sizes: Sizes) -> Backend:  # noqa: D102
        self._num_opened += 1
        with self.team.together():
            self.team.tell("open", self._num_opened, sizes)
        return ParallelBackend(self.team, self._num_opened, super().open(sizes))

    def replace_draft(self, draft: DraftWeights) -> None:
        """Raises ValueError: the other ranks would go on with the draft that they loaded."""
        num_ranks = 1 + len(self.team.processes)
        raise ValueError(f"tensor_parallel_size={num_ranks}: the draft of several ranks cannot be replaced; use 1")

    def system(self) -> dict[str, object]:  # noqa: D102
        return super().system() | {"ranks": self.num_ranks, "parallel_mode": self.team.ranks.share.mode}

    def close(self) -> None:  # noqa: D102
        self.team.close()


@dataclass(frozen=True)
class CountedOutcome:
    """A step of rank 0, whose reading the other ranks are told of with the next order."""

    pending: Pending
    owner: ParallelBackend

    def read(self) -> StepOutput:  # noqa: D102
        self.owner.num_read += 1
        return self.pending.read()


class ParallelBackend:
    """Rank 0's backend, whose calls all ranks carry out. See backends/base.py for what each method promises."""

    is_async = True

    def __init__(self, team: Team, number: int, own: Backend) -> None:
        self._team, self._number, self._own, self.num_read = team, number, own, 0

    def _together(self, name: str, *arguments: Any, told: tuple[object, ...] | None = None) -> Any:
        """Call a method on every rank; told: the arguments of the others, where they are not rank 0's."""
        with self._team.together():
            self._team.tell(name, self._number, self.num_read, arguments if told is None else told)
            self.num_read = 0
            return getattr(self._own, name)(*arguments)

    def draft(self, step: StepInput) -> Drafts:  # noqa: D102
        drafts: Drafts = self._together("draft", step)
        return drafts

    def verify(  # noqa: D102
        self, step: StepInput, drafts: Drafts | DraftTree, masks: TokenMasks | None = None, edits: RowEdits = ()
    ) -> Pending:
        if edits:
            raise ValueError("edits: what the host does with logits is not sent to other ranks; load the pair on one")
        told = step, drafts if isinstance(drafts, DraftTree) else None, masks
        return CountedOutcome(self._together("verify", step, drafts, masks, told=told), self)

    def step(self, step: StepInput) -> Pending:  # noqa: D102
        return CountedOutcome(self._together("step", step), self)

    def repeat(self, step: StepInput, most: int) -> Sequence[Pending]:  # noqa: D102
        return [self.step(step)]

    def score(self, documents: Sequence[Int32]) -> Scored:  # noqa: D102
        scored: Scored = self._together("score", documents)
        return scored

    def renew_draft(self, first_draft_keys: Mapping[int, int]) -> None:
        """Never called: ParallelPair.replace_draft refuses."""

    def time_parts(self, is_wanted: bool) -> None:
        """Parts are not timed, as in TorchBackend."""

    def close(self) -> None:  # noqa: D102
        if not self._team.error:
            self._together("close")
        self._own.close()


@dataclass(eq=False)
class Follower:
    """Another rank's backend. drafts: of its last `draft`; unread: its steps, the oldest first."""

    own: Backend
    drafts: Drafts | None = None
    unread: deque[Pending] = field(default_factory=deque)

    def obey(self, name: str, num_read: int, arguments: tuple[Any, ...]) -> None:
        """Read what rank 0 has read, and make its call."""
        for _ in range(num_read):
            self.unread.popleft().read()
        if name == "verify":
            step, tree, masks = arguments
            arguments = step, self.drafts if tree is None else tree, masks
        result = getattr(self.own, name)(*arguments)
        if name == "draft":
            self.drafts = result
        elif name in ("verify", "step"):
            self.unread.append(result)


def follow() -> None:
    """The body of the process of a rank other than 0. It ends when rank 0 says so, is gone, or keeps it waiting."""
    for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 ends first
        signal.signal(number, signal.SIG_IGN)
    opening: RankStart = pickle.loads(sys.stdin.buffer.read())
    torch.set_num_threads(opening.threads)
    rank, followers = opening.share.rank, dict[int, Follower]()
    store = TCPStore(HOST, opening.port, is_master=False)
    store.set(f"started {rank}", "")
    try:
        ranks = linked(opening.share, store, opening.settings["device"])
        pair = TorchPair(*opening.load(), **opening.settings, ranks=ranks)
        store.set(f"loaded {rank}", "")
        while True:
            name, *order = ranks.receive()
            if name == "end":
                return
            if name == "open":
                number, sizes = order
                followers[number] = Follower(pair.open(sizes))
                continue
            with contextlib.suppress(ValueError):  # what rank 0 refuses too, before ranks meet
                number, num_read, arguments = order
                followers[number].obey(name, num_read, arguments)
            if name == "close":
                del followers[number]
    except Parted:
        os._exit(GAVE_UP)

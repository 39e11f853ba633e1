"""Ranks as threads of one process, linked by gloo as the processes of a pair are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import HashStore

from aquiline.backends.torch.ranks import LinkedRanks
from aquiline.config import ParallelMode
from aquiline.models.shares import Share

T = TypeVar("T")


def on_ranks(
    num_ranks: int, work: Callable[[LinkedRanks], T], limit_s: float = 60.0, mode: ParallelMode = "gather"
) -> list[T]:
    """What each of so many ranks makes of its work. Every rank computes with one thread."""
    store, limit = HashStore(), timedelta(seconds=limit_s)

    def run(rank: int) -> T:
        torch.set_num_threads(1)
        with torch.inference_mode():
            return work(LinkedRanks(Share(rank, num_ranks, mode), store, limit, limit))

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(run, range(num_ranks)))

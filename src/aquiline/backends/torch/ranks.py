"""Where ranks meet: each computes its share of the outputs and all gather them, or each a part of the sums.

`Ranks` alone is one rank that has everything; a model, a draw and a step call it wherever ranks would meet.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, Work
from torch.nn.functional import pad

from aquiline.models.shares import OUTPUTS, Share


class Ranks:
    """One rank, which has everything."""

    share = Share()

    def stacked(self, x: Tensor) -> Tensor:
        """The tensors x of all ranks, which have one shape: [ranks, ...]."""
        return x[None]

    def gather(self, x: Tensor, count: int, unit: int = OUTPUTS) -> Tensor:
        """All outputs [..., count], of which x [..., n] are this rank's."""
        if self.share.ranks == 1:
            return x
        sizes = [own.stop - own.start for own in self.share.parts(count, unit)]
        every = self.stacked(pad(x, (0, max(sizes) - x.shape[-1])))
        return torch.cat([part[..., :size] for part, size in zip(every, sizes, strict=True)], -1)

    def inputs(self, x: Tensor, count: int, unit: int) -> Tensor:
        """What the linear that ends a block reads: all its inputs [..., count], or in "reduce" this rank's x. x may
        also have what other ranks compute of the same key head (Share.heads)."""
        if self.share.ranks == 1 or self.share.mode == "reduce":
            return x
        own = self.share.part(count, unit)
        size = own.stop - own.start
        first = self.share.rank * size % x.shape[-1]
        return self.gather(x[..., first : first + size], count, unit)

    def outputs(self, x: Tensor, count: int) -> Tensor:
        """All outputs [..., count] of a block, of which x are this rank's, or in "reduce" its part of each."""
        return self.summed(x) if self.share.mode == "reduce" else self.gather(x, count)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of the tensors x of all ranks, the same bits on each; x is overwritten."""
        return x

    def embed(self, table: Tensor, tokens: Tensor, count: int) -> Tensor:
        """Rows of an embedding of `count` tokens, of which this rank has its part: tokens [...] -> [..., H]."""
        if self.share.ranks == 1:
            return table[tokens]
        own, ends = self.share.part(count), [part.stop for part in self.share.parts(count)]
        rows = tokens.flatten()
        every = self.stacked(table[(rows - own.start).clamp(0, len(table) - 1)])
        owner = torch.bucketize(rows, torch.tensor(ends, device=rows.device), right=True)
        return every[owner, torch.arange(len(rows), device=rows.device)].view(*tokens.shape, -1)

    def columns(self, logits: Tensor, ids: Tensor, is_whole: bool) -> tuple[Tensor, Tensor, Ranks]:
        """Logits to draw from, the ids of their columns, and the ranks among which the best is to be found.

        logits [n, V]: of all ids [V], or this rank's of them. is_whole: whether all are needed."""
        if logits.shape[-1] == len(ids):
            return logits, ids, ALONE
        if is_whole:
            return self.gather(logits, len(ids)), ids, ALONE
        return logits, ids[self.share.part(len(ids))], self


ALONE = Ranks()
ORDER_WORDS = 1024
"""Words of 32 bits in the tensor that every order is sent in. What is longer follows in a second one."""


class Parted(RuntimeError):
    """A rank has waited for another in vain."""


class LinkedRanks(Ranks):
    """One of several ranks, linked by torch.distributed: gloo for CPUs and for orders, NCCL for GPUs.

    num_collectives, num_bytes: how often they have met, and what this rank has sent to each other one."""

    def __init__(
        self, share: Share, store: Store, limit: timedelta, idle: timedelta, device: str = "cpu"
    ) -> None:  # fmt: skip
        """limit: the longest that a rank waits for the others while it computes; idle: that it waits for orders."""
        self.share, self.num_collectives, self.num_bytes = share, 0, 0.0
        self._limit, self._idle = limit, idle
        place = share.rank, share.ranks
        self._orders: Any = ProcessGroupGloo(PrefixStore("ranks", store), *place, limit)
        self._links: Any = self._orders
        if device == "cuda":
            from torch._C._distributed_c10d import ProcessGroupNCCL

            options = ProcessGroupNCCL.Options()
            options._timeout = timedelta(days=1)  # NCCL ends the process then, so `_meet` has to give up before
            self._links = ProcessGroupNCCL(PrefixStore("links", store), *place, options)

    def stacked(self, x: Tensor) -> Tensor:  # noqa: D102
        every = x.new_empty(self.share.ranks * x.numel())
        self._meet(self._links._allgather_base(every, x.contiguous().flatten()), self._limit)
        self._count(x.nbytes)
        return every.view(self.share.ranks, *x.shape)

    def summed(self, x: Tensor) -> Tensor:  # noqa: D102
        x = x.contiguous()
        self._meet(self._links.allreduce([x]), self._limit)
        self._count(2 * x.nbytes / self.share.ranks)
        return x

    def _count(self, num_bytes: float) -> None:
        self.num_collectives, self.num_bytes = self.num_collectives + 1, self.num_bytes + num_bytes

    def tell(self, order: Any) -> None:
        """Send an order to the other ranks, which `receive` it."""
        text = pickle.dumps(order)
        words = np.zeros(max(ORDER_WORDS, 1 + -(-len(text) // 4)), np.int32)
        words[0] = len(text)
        words[1:].view(np.uint8)[: len(text)] = np.frombuffer(text, np.uint8)
        for part in np.split(words, [ORDER_WORDS]):
            if len(part):
                self._broadcast(torch.from_numpy(part), self._limit)

    def receive(self) -> Any:
        """Wait for the next order."""
        words = torch.zeros(ORDER_WORDS, dtype=torch.int32)
        self._broadcast(words, self._idle)
        rest = torch.zeros(max(0, 1 - (-int(words[0]) // 4) - ORDER_WORDS), dtype=torch.int32)
        if len(rest):
            self._broadcast(rest, self._limit)
        return pickle.loads(torch.cat((words, rest)).numpy().tobytes()[4 : 4 + int(words[0])])

    def _broadcast(self, words: Tensor, limit: timedelta) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, limit
        self._meet(self._orders.broadcast([words], options), limit)

    def _meet(self, work: Work, limit: timedelta) -> None:
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise Parted(str(error)) from error

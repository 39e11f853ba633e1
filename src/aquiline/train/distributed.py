"""Several processes that train one draft, started by torchrun: which rank computes which rows, and what ranks exchange.

Every rank holds the whole target and scores its own rows with it. Gradients are summed, not averaged, since each rank's
loss is already divided by the rows of the whole batch. With `ddp` the draft, its master weights and its optimizer state
are on every rank; with `fsdp` they are split, and gathered for the time of a step; with `hsdp` each node has them all,
split over its ranks. Checkpoints hold whole tensors in any case, so a run may be resumed with another number of ranks.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

BUCKET_BYTES = 64 << 20
"""Gradients summed in one call: long enough for full bandwidth, short enough to need little memory."""
PATIENCE = timedelta(hours=2)
"""How long the other ranks wait for the first one, which alone judges the draft on held-out text."""


@dataclass(frozen=True)
class World:
    """One rank of `size`, of which each node has per_node; `parallel` is "none" where there is a single process outside
    torchrun."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"
    parallel: str = "none"
    per_node: int = 1

    @property
    def num_parts(self) -> int:
        """The parts that the draft and its optimizer's state are split into."""
        return {"fsdp": self.size, "hsdp": self.per_node}.get(self.parallel, 1)

    @property
    def is_split(self) -> bool:
        """Whether ranks may have a part of the draft alone."""
        return self.parallel in ("fsdp", "hsdp")

    @property
    def is_first(self) -> bool:
        """Whether this rank writes, logs and judges."""
        return self.rank == 0

    def share(self, rows: list[Any]) -> list[Any]:
        """This rank's part of a batch's rows; the parts of two ranks differ by one row at most."""
        edges = [len(rows) * r // self.size for r in (self.rank, self.rank + 1)]
        return rows[edges[0] : edges[1]]

    def sum(self, values: Sequence[float]) -> list[float]:
        """Each value summed over all ranks."""
        if self.parallel == "none":
            return list(values)
        told = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(told)
        summed: list[float] = told.tolist()
        return summed

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Copy the first rank's tensors into those of every rank, in place."""
        if self.parallel == "none":
            return
        for tensor in tensors:
            there = tensor.detach().to(self.device)
            dist.broadcast(there, 0)
            tensor.detach().copy_(there)

    def shard(self, module: nn.Module, whole: set[nn.Parameter]) -> None:
        """Where the draft is split, split the module's parameters, `whole` excepted: from now on they are DTensors,
        except while its forward and backward run."""
        if not self.is_split:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        axes = {"copies": self.size // self.num_parts, "parts": self.num_parts}
        if self.parallel == "fsdp":
            del axes["copies"]
        mesh = init_device_mesh(self.device.partition(":")[0], tuple(axes.values()), mesh_dim_names=tuple(axes))
        fully_shard(module, mesh=mesh, ignored_params=whole)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no operation that scales on the way

    def reduce(self, parameters: Sequence[nn.Parameter]) -> None:
        """With ddp, sum every gradient over all ranks, in place. Where the draft is split, the backward has done it."""
        if self.parallel != "ddp":
            return
        grads = [p.grad for p in parameters if p.grad is not None]
        ends = itertools.accumulate(grad.nbytes for grad in grads)
        places = (end // BUCKET_BYTES for end in ends)
        for _, pairs in itertools.groupby(zip(places, grads, strict=True), key=itemgetter(0)):
            bucket = [grad for _, grad in pairs]
            flat = torch.cat([grad.flatten() for grad in bucket])
            dist.all_reduce(flat)
            for grad, part in zip(bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))

    def leave(self) -> None:
        """End the process group with its threads; no tensor that is split over the ranks may be in use any more.

        Those threads free tensors of Python's, for which they take its lock. A thread that does so while Python ends
        aborts the process. Threads end with the group, and the group with the last reference to it: fsdp's state has
        one and is part of cycles, a device mesh has one and stays in torch's caches."""
        if self.parallel == "none":
            return
        gc.collect()
        if self.is_split:
            from torch.distributed.device_mesh import DeviceMesh

            for mesh in [found for found in gc.get_objects() if type(found) is DeviceMesh]:
                vars(mesh).get("_pg_registry", {}).clear()
        dist.destroy_process_group()


def alone() -> World:
    """A single process outside torchrun."""
    return World(device="cuda" if torch.cuda.is_available() else "cpu")


def join(parallel: str | None) -> World:
    """The world that torchrun made, or a single process. `parallel` None means ddp under torchrun.

    Raises ValueError if `parallel` is asked for outside torchrun, and for nodes of unlike size where each is to have a
    whole draft."""
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if not is_launched:
        if parallel is not None:
            raise ValueError(
                f"parallel={parallel!r}: needs several processes; start them with "
                "`torchrun --nproc-per-node N --no-python aquiline train ...`, or drop the option"
            )
        return alone()
    size = int(os.environ["WORLD_SIZE"])
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if parallel == "hsdp" and size % per_node:
        raise ValueError(f"parallel='hsdp': {size} ranks are no whole nodes of {per_node}; use 'fsdp', or equal nodes")
    device, backend = "cpu", "gloo"
    if torch.cuda.is_available():
        device, backend = f"cuda:{os.environ.get('LOCAL_RANK', '0')}", "nccl"
        torch.cuda.set_device(device)
    # Default arguments in this module are the group that there is when it is imported. Torch imports it for optimizers,
    # and the group would never end (see World.leave).
    import_module("torch.distributed.nn.functional")
    dist.init_process_group(backend, timeout=PATIENCE)
    return World(dist.get_rank(), size, device, parallel or "ddp", per_node)


def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be split over the ranks. All ranks must call this together."""
    return tensor.full_tensor() if _is_split(tensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that may be split, sharing its memory."""
    return tensor.to_local() if _is_split(tensor) else tensor


def split_like(whole: Tensor, like: Tensor) -> Tensor:
    """A whole tensor split over the ranks as `like` is, if it is."""
    if not _is_split(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements)


def _is_split(tensor: Tensor) -> TypeGuard[DTensor]:
    if type(tensor) in (Tensor, nn.Parameter):  # the common case, without importing anything
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)

"""Memory of the host that a device copies to and from while the host goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.types import Int32


@dataclass(eq=False)
class HostBuffer:
    """Memory of the host, int32, that the device copies without waiting. array: the same memory; busy: an event after
    the last copy; None on a CPU."""

    memory: Tensor
    array: Int32
    busy: torch.cuda.Event | None

    @classmethod
    def new(cls, shape: tuple[int, ...], device: torch.device) -> HostBuffer:
        """Pinned where the device is a GPU."""
        is_cuda = device.type == "cuda"
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        event = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        return cls(memory, memory.numpy(), event)

    def record(self) -> None:
        """A copy was issued."""
        if self.busy is not None:
            self.busy.record()

    def wait(self) -> None:
        """Wait for the last copy that was issued."""
        if self.busy is not None:
            self.busy.synchronize()

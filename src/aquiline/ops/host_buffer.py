"""Memory of the host that a device copies to and from while the host goes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class HostBuffer:
    """Memory of the host that the device copies without waiting. busy: an event after the last copy; None on a CPU."""

    memory: Tensor
    busy: torch.cuda.Event | None

    @classmethod
    def new(cls, shape: tuple[int, ...], device: torch.device) -> HostBuffer:
        """Pinned where the device is a GPU."""
        is_cuda = device.type == "cuda"
        return cls(torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda), torch.cuda.Event() if is_cuda else None)

    def record(self) -> None:
        """A copy was issued."""
        if self.busy is not None:
            self.busy.record()

    def wait(self) -> None:
        """Wait for the last copy that was issued."""
        if self.busy is not None:
            self.busy.synchronize()

"""PERF mode: what no measured step may do, noticed when it is done. Watching costs time of its own and is asked for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from aquiline.errors import PerfViolation

Rule = Literal["fallback", "untuned", "multi-token off", "host read", "allocation", "compile", "broken mask"]
"""fallback: a step of decodes that no program holds; untuned: a kernel whose shape has no entry in the table;
multi-token off: a slot that may draft does not, before the request's last token; host read: the host waits for a value;
allocation: memory of the device; compile: a program that is built; broken mask: rows that see what they must not."""

READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "unique", "equal", "bincount")
FREE = ("aten.copy_", "aten.slice", "aten.select", "aten.view", "aten.detach", "aten.alias")
"""Operations that neither allocate nor wait."""


class PerfWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rules that were broken since the warm-up, each breach once. is_strict: the first raises PerfViolation. As a mode
    it watches the host's part of a step, which sends a message and asks for an outcome."""

    def __init__(self, device: torch.device, is_strict: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.is_strict, self.violations = device, is_strict, list[str]()

    def note(self, rule: Rule, what: str) -> None:
        """A rule was broken."""
        text = f"{rule}: {what}"
        if self.is_strict:
            raise PerfViolation(text)
        if text not in self.violations:
            self.violations.append(text)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation; note one that waits or allocates."""
        name = str(func)
        if any(read in name for read in READS):
            self.note("host read", name)
        elif not name.startswith(FREE):
            self.note("allocation", name)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def device_part(self) -> Iterator[None]:
        """Watch the launches of a step on a CUDA device, where torch tells of waits and of memory."""
        if self.device.type != "cuda":
            yield
            return
        before, mode = self._num_allocations(), torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        for warning in heard:
            self.note("host read", str(warning.message))
        if (count := self._num_allocations() - before) > 0:
            self.note("allocation", f"{count} while a program ran")

    def _num_allocations(self) -> int:
        return int(torch.cuda.memory_stats(self.device)["allocation.all.allocated"])

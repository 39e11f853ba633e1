"""Launches in order under the names of a trace's ranges: what a program is made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from aquiline.ops.triton.launch import Launch


@dataclass(frozen=True, eq=False)
class TorchCall:
    """A call of torch that copies between buffers, beside the launches of kernels."""

    name: str
    function: Callable[[], object]

    def run(self) -> None:
        """Issue it on the current stream."""
        self.function()


@dataclass(eq=False)
class Launches:
    """Launches in order. Each name begins with that of a range in a trace (bench/suite/stages.py), up to a dot."""

    each: list[Launch | TorchCall] = field(default_factory=list)

    def add(self, name: str, *launches: Launch | TorchCall) -> None:
        """Add launches of a range; those that have its name already keep theirs."""
        for own in launches:
            self.each.append(own if own.name.startswith(name) else replace(own, name=f"{name}.{own.name}"))

    def __iter__(self) -> Iterator[Launch | TorchCall]:
        return iter(self.each)

    def run(self) -> None:
        """Issue them all."""
        for own in self:
            own.run()

"""The state of slots, whose changes the host sends as messages.

A message is copied once, through a pinned buffer that is used again after `DEPTH` messages: then the copy is long over.
"""

from __future__ import annotations

import numpy as np
import torch

from aquiline.backends.base import Sizes
from aquiline.backends.torch.slot_state import SlotState
from aquiline.ops.host_buffer import HostBuffer
from aquiline.ops.triton.message import write_words
from aquiline.types import Int32

DEPTH = 4
"""Host buffers of each kind."""
ROOM = 4096
"""Words that one message can set."""


class MailedState(SlotState):
    """The state of slots, whose changes arrive as messages of int32. `applying` writes the last one that was posted."""

    def __init__(self, sizes: Sizes, device: torch.device, num_more: int) -> None:
        super().__init__(sizes, device, num_more)
        self._message = torch.zeros(1 + 2 * ROOM, dtype=torch.int32, device=device)
        self._buffers = [HostBuffer.new((1 + 2 * ROOM,), device) for _ in range(DEPTH)]
        self._number = 0
        self.applying = write_words(self.words, self._message)

    def write_changes(self) -> None:
        """Write what was assigned."""
        words, values = self.take_changes()
        for first in range(0, len(words), ROOM):
            self._post(words[first : first + ROOM], values[first : first + ROOM])
            self.applying.run()

    def post_changes(self) -> None:
        """Send what was assigned, ROOM words at most, to the device, where `applying` is still to be run."""
        self._post(*self.take_changes())

    @property
    def num_changes(self) -> int:
        """Words that were assigned and are not sent."""
        return sum(len(values) for _, values in self._changes)

    def _post(self, words: Int32, values: Int32) -> None:
        buffer = self._buffers[self._number % DEPTH]
        self._number += 1
        buffer.wait()
        pairs = np.stack((words, values), 1).reshape(-1)
        buffer.array[0], buffer.array[1 : 1 + len(pairs)] = len(words), pairs
        self._message[: 1 + len(pairs)].copy_(buffer.memory[: 1 + len(pairs)], non_blocking=True)
        buffer.record()

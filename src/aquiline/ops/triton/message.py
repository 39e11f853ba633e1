"""The host's message to the device: which words of the slots' state become what."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from aquiline.ops.triton.launch import Launch, check_integers

BLOCK = 1024
"""Words that one program writes."""


@triton.jit
def message_kernel(words, message, BLOCK: tl.constexpr):
    """One block of the words. Grid: blocks."""
    count = tl.load(message)
    if tl.program_id(0) * BLOCK >= count:
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(message + 1 + 2 * i, mask=i < count, other=0)
    value = tl.load(message + 2 + 2 * i, mask=i < count, other=0)
    tl.store(words + place, value, mask=i < count)


def write_words(words: Tensor, message: Tensor) -> Launch:
    """Write into `words` [n] what a message says, both int32: the number of pairs, then for each the place of a word
    and its value. No place may stand twice. Raises ValueError for tensors that do not fit."""
    check_integers("words", words, words.numel())
    check_integers("message", message, message.numel(), like=words)
    room = (message.numel() - 1) // 2
    return Launch(
        "MESSAGE", message_kernel, (triton.cdiv(room, BLOCK),), (words, message), {"BLOCK": BLOCK}, bytes=16 * room
    )  # fmt: skip

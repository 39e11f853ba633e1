"""The data that crosses layers, the legend of shapes and the glossary. No behaviour lives here.

Shapes     R rows of one forward, B active slots, N tree nodes, D tree depth, H hidden size, I MLP width, V vocabulary,
           Vd draft vocabulary, Hq query heads, Hkv key/value heads, Dh head dimension, L layers, S slots, P pages.

Glossary   target    the model whose text is produced          draft   the small head that guesses ahead
           root      last token known, not yet in the KV cache node    a drafted token hanging below the root
           path      the nodes from the root to a node         bonus   the token the target adds after the path
           slot      a place in the running batch              page    a run of KV indices owned by one sequence
           feature   target residual-stream vectors of three layers, concatenated (3H)
           KV index  place of a key in its sequence; equals the token's position, except for tree nodes, which are
                     written one after the other behind the root, and for the draft, which stores row j at j + 1
           tau       mean number of tokens committed per active slot and step, bonus included
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from aquiline.blocks import FLOATS, PACKED, Array

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
UInt64 = NDArray[np.uint64]
Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]

FinishReason = Literal["stop", "length", "abort", "deadline", "error"]

Source = Literal["draft", "lookup", "target"]
"""Who wrote a token first: the draft model, a copy from text that was there before, or the target itself. The target
checked every token of the other two."""

KEY_GROUP = 16
"""Keys are stored transposed in groups of this many, so that one vector register holds one channel of 16 keys."""

CODE_GROUP = 4
"""Codes of eight bits are stored in words of this many: channels of a key, or values of one channel."""


@dataclass(frozen=True, eq=False)
class KVGroup:
    """The storage of one model's keys and values, in pages.

    k [P, L, Hkv, page_size / 16, Dh, 16]: transposed in groups of KEY_GROUP keys; v [P, L, Hkv, page_size, Dh]. All
    layers of a page lie together, so that a short text touches little memory, however many layers and pages there are.
    Values outside the written indices are undefined and never read into a result.

    In int8, k [P, L, Hkv, page_size / 16, Dh / 4, 16, 4] holds codes plus 128, uint8, v [P, L, Hkv, page_size / 4, Dh,
    4] codes, int8, and k_scales and v_scales [P, L, Hkv, page_size] a float32 scale for each of them."""

    k: Array
    v: Array
    k_scales: Float32 | None = None
    v_scales: Float32 | None = None

    @property
    def page_size(self) -> int:
        """KV indices of one page."""
        return int(self.k.shape[3]) * KEY_GROUP

    @property
    def num_pages(self) -> int:
        """Pages; each holds its keys of every layer."""
        return int(self.v.shape[0])


@dataclass(eq=False)
class Rows:
    """The flat rows of one forward: static buffers of which the first `num` are valid.

    A row sees the KV indices [key_start, context_len) of its slot, in order, then tail[:tail_len] in order; the t-th
    tail entry stands at position context_len + t. A chunk row or chain node has an empty tail and
    context_len = its KV index + 1; a tree node's tail is its own path, itself last. Rows are grouped by slot.
    """

    max_rows: int
    max_tail: int
    page_table: Int32  # [S, max pages per slot]: page of a slot's KV indices [i * page_size, (i + 1) * page_size)
    num: int = 0
    tokens: Int32 = field(init=False)
    positions: Int32 = field(init=False)  # rotary positions
    slots: Int32 = field(init=False)
    write: Int32 = field(init=False)  # KV index the row's key and value go to; -1 writes nothing
    key_start: Int32 = field(init=False)
    context_len: Int32 = field(init=False)
    tail: Int32 = field(init=False)  # [max_rows, max_tail] KV indices
    tail_len: Int32 = field(init=False)

    def __post_init__(self) -> None:
        names = ("tokens", "positions", "slots", "write", "key_start", "context_len", "tail_len")
        for name in names:
            setattr(self, name, np.zeros(self.max_rows, np.int32))
        self.tail = np.zeros((self.max_rows, self.max_tail), np.int32)


RowSampling = NDArray[np.void]
"""How the next token of each of n rows is drawn, an array of SAMPLING.

temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch a filter off. `position` is the absolute position of the
token being drawn, which with the seed keys the noise."""

SAMPLING = np.dtype(
    [
        ("temperature", np.float32), ("top_p", np.float32), ("min_p", np.float32), ("top_k", np.int32),
        ("position", np.int32), ("seed", np.uint64),
    ],
    align=True,
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class TopK:
    """ids int32 [n, k], best first, ties to the lowest id, and their log-probabilities float32 [n, k]."""

    ids: Int32
    logprobs: Float32


@dataclass(frozen=True, eq=False)
class Logprobs:
    """Log-probabilities of n rows, from the logits before temperature, penalties and filters.

    chosen float32 [n]: the log-probability of each row's chosen token. rank int32 [n]: the place of that token among
    all ids in the order of TopK, from 1. top: the k best ids; k may be 0. Where a logit is NaN or +inf, or no logit is
    finite, log-probabilities are NaN, and ids and ranks mean nothing."""

    chosen: Float32
    rank: Int32
    top: TopK


@dataclass(frozen=True)
class TokenLogprobs:
    """One token's log-probability and rank (1 is the most probable), and the best ids at its place, best first."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(frozen=True, eq=False)
class AcceptResult:
    """What a step decided for each of B slots.

    path int32 [B, D + 1]: slot-local nodes from the root (0) down, valid up to num_accepted[b]; tokens int32
    [B, D + 1]: the num_accepted[b] accepted tokens, then the bonus, then -1."""

    path: Int32
    tokens: Int32
    num_accepted: Int32


def storage_dtype(name: str) -> np.dtype[Any]:
    """The dtype of the floats among the weights under a `dtype` setting. Raises ValueError for an unknown setting.

    int8 and int4 are for linears (ops/quantise.py); the other weights are bfloat16 beside them. Beside "packed" blocks
    that is what the keys are stored in."""
    beside = FLOATS["bfloat16"]
    dtypes = FLOATS | {"int8": beside, "int4": beside, PACKED: beside}
    if name not in dtypes:
        raise ValueError(f"dtype={name!r}: must be one of {', '.join(dtypes)}")
    return dtypes[name]

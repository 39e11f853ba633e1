"""The state of every slot: tensors on the device, and the few numbers that the host needs to choose shapes.

Where a number depends on drawn tokens, the host knows only an upper bound of it, because it reads nothing back while a
step is issued.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import Admit, Pages, Sizes
from aquiline.backends.torch.logit_rules import Rules
from aquiline.types import Int32

MASK32 = 0xFFFFFFFF
SCALARS = ("root", "draft_end", "first_draft_key", "top_k", "temperature", "top_p", "min_p")
"""What a slot has one of: integers, then floats."""


@dataclass(eq=False)
class HostSlot:
    """A slot as the host sees it. max_root: an upper bound of the root's index. max_lag: an upper bound of the draft
    keys that the next draft pass has to write. draft_end: exact while the prompt is computed. rules: what changes the
    logits, None if nothing does."""

    admit: Admit
    max_root: int = 0
    max_lag: int = 0
    draft_end: int = 0
    num_prompt_logprobs: int = 0
    rules: Rules | None = None
    growth: deque[int] = field(default_factory=deque)  # the most tokens that each unread step may add

    @property
    def needs_logits(self) -> bool:
        """Whether more is read of a row's logits than the best score, or they are changed by rules."""
        return self.rules is not None or self.admit.sampling.logprobs is not None

    def grow(self, num_tokens: int) -> None:
        """A step was issued that may add up to num_tokens tokens."""
        self.growth.append(num_tokens)
        self.max_root += num_tokens

    def grown(self, root: int) -> None:
        """The oldest unread step was read: the root behind it is known."""
        self.growth.popleft()
        self.max_root = root + sum(self.growth)


@dataclass(frozen=True)
class RowSampling:
    """How each of n rows draws. temperature, top_p, min_p, top_k [n]; seed [n, 2]: words of 32 bits, the low one first;
    position [n]: of the drawn token. filters: whether any row may have a top-k, top-p or min-p filter."""

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    seed: Tensor
    position: Tensor
    filters: bool


class SlotState:
    """The state of S slots, each number of it a word of one tensor, so that all changes of a step are written at once.

    history [S, C + 1]: a slot's tokens by index, the last column is scratch; root, draft_end, first_draft_key [S];
    table [S, pages per slot]: the slot's pages; seed [S, 2]: the bits of its words; scratch: the place behind all
    pages. more [num_more]: further words, for whoever runs the steps."""

    def __init__(self, sizes: Sizes, device: torch.device, num_more: int = 0) -> None:
        self.sizes, self.device, self.hosts = sizes, device, dict[int, HostSlot]()
        self.scratch = sizes.num_pages * sizes.page_size
        self.widths = {"history": sizes.max_context + 1, "table": sizes.pages_per_slot, "seed": 2}
        self.widths |= dict.fromkeys(SCALARS, 1)
        lengths = [*(sizes.num_slots * width for width in self.widths.values()), num_more]
        self.words = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
        self._changes: list[tuple[int, Int32]] = []  # first words, and what they and the next become
        *parts, self.more = torch.split(self.words, lengths)
        self.first_words = {name: int(part.storage_offset()) for name, part in zip(self.widths, parts, strict=True)}
        views = {name: part.view(sizes.num_slots, -1) for name, part in zip(self.widths, parts, strict=True)}
        self.history, self.table, self.seed = (views[name] for name in ("history", "table", "seed"))
        self.root, self.draft_end, self.first_draft_key, self.top_k = (views[name][:, 0] for name in SCALARS[:4])
        self.temperature, self.top_p, self.min_p = (views[name].view(torch.float32)[:, 0] for name in SCALARS[4:])

    def assign(self, name: str, slot: int, values: Any, first: int = 0) -> None:
        """Let words of a slot from `first` on be these values, 32 bits each, when `write_changes` is called next."""
        self.assign_words(self.first_words[name] + slot * self.widths[name] + first, values)

    def assign_words(self, at: int, values: Any) -> None:
        """The same of any words, the first of which is `at`."""
        self._changes.append((at, np.ascontiguousarray(values).view(np.int32).reshape(-1)))

    def take_changes(self) -> tuple[Int32, Int32]:
        """The words that were assigned since the last call, each once, and their values."""
        changes, self._changes = self._changes, []
        empty = np.zeros(0, np.int32)
        words = np.concatenate([empty, *(np.arange(at, at + len(own), dtype=np.int32) for at, own in changes)])
        values = np.concatenate([empty, *(own for _, own in changes)])
        _, last = np.unique(words[::-1], return_index=True)  # of a word that was assigned twice, the later value
        return words[::-1][last], values[::-1][last]

    def write_changes(self) -> None:
        """Write what was assigned."""
        words, values = (torch.from_numpy(array.copy()).to(self.device) for array in self.take_changes())
        self.words[words] = values

    def admit(self, admit: Admit, vocab_size: int) -> None:
        """A sequence takes its slot."""
        slot, s = admit.slot, admit.sampling
        assert s.seed is not None, "the engine resolves seeds"
        rules = Rules(admit, vocab_size, self.device) if s.changes_logits or admit.bad_words else None
        self.hosts[slot] = HostSlot(
            admit, draft_end=admit.draft_end, num_prompt_logprobs=admit.num_prompt_logprobs, rules=rules
        )
        self.assign("history", slot, np.array(admit.tokens, np.int32))
        for name in ("first_draft_key", "draft_end"):
            self.assign(name, slot, np.int32(getattr(admit, name)))
        self.assign("top_k", slot, np.int32(s.top_k))
        for name in SCALARS[4:]:
            self.assign(name, slot, np.float32(getattr(s, name)))
        self.assign("seed", slot, np.uint64(s.seed))

    def renew_draft(self, slot: int, first_draft_key: int) -> None:
        """All draft keys of a slot are missing, and the first is to stand at that index."""
        host = self.hosts[slot]
        host.admit = replace(host.admit, first_draft_key=first_draft_key)
        self.first_draft_key[slot] = self.draft_end[slot] = host.draft_end = first_draft_key
        host.max_lag = max(1, host.max_root + 1 - first_draft_key)

    def set_pages(self, change: Pages) -> None:
        """Enter pages in a slot's table."""
        self.assign("table", change.slot, np.array(change.pages, np.int32), change.first)

    def places(self, slots: Tensor, indices: Tensor, is_real: Tensor | None = None) -> Tensor:
        """Places of KV indices [b, ...] of slots [b]; the scratch place where not is_real."""
        size = self.sizes.page_size
        owner = slots.view(-1, *(1,) * (indices.dim() - 1)).expand_as(indices)
        page = (indices // size).clamp(0, self.sizes.pages_per_slot - 1)
        place = self.table[owner, page] * size + indices % size
        return place if is_real is None else torch.where(is_real, place, self.scratch)

    def tokens_at(self, slots: Tensor, indices: Tensor) -> Tensor:
        """Known tokens at indices [b, n] of slots [b]; -1 before the first."""
        found = self.history[slots[:, None], indices.clamp(0, self.sizes.max_context)]
        return torch.where(indices >= 0, found, -1)

    def write_tokens(self, slots: Tensor, indices: Tensor, tokens: Tensor, is_real: Tensor) -> None:
        """Enter tokens [b, n] at indices [b, n] where is_real."""
        self.history[slots[:, None], torch.where(is_real, indices, self.sizes.max_context)] = tokens.int()

    def sampling(self, slots: list[int], owner: Tensor, positions: Tensor) -> RowSampling:
        """How n rows draw their tokens, which will stand at positions [n]. owner [n]: each row's slot, one of
        `slots`."""
        each = [self.hosts[slot].admit.sampling for slot in slots]
        return RowSampling(
            self.temperature[owner], self.top_p[owner], self.min_p[owner], self.top_k[owner],
            self.seed[owner].long() & MASK32, positions, filters=any(s.top_k or s.top_p < 1 or s.min_p for s in each),
        )  # fmt: skip

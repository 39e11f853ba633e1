"""The state of every slot: tensors on the device, and the few numbers that the host needs to choose shapes.

Where a number depends on drawn tokens, the host knows only an upper bound of it, because it reads nothing back while a
step is issued.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from aquiline.backends.base import Admit, Pages, Sizes
from aquiline.backends.torch.logit_rules import Rules

MASK32 = 0xFFFFFFFF


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


@dataclass(eq=False)
class SlotState:
    """The state of S slots. history [S, C + 1]: a slot's tokens by index, the last column is scratch; root, draft_end,
    first_draft_key [S]; table [S, pages per slot]: the slot's pages; scratch: the place behind all pages."""

    sizes: Sizes
    device: torch.device
    hosts: dict[int, HostSlot] = field(default_factory=dict)

    def __post_init__(self) -> None:
        S = self.sizes.num_slots
        self.history = self._integers(S, self.sizes.max_context + 1)
        self.root, self.draft_end, self.first_draft_key = (self._integers(S) for _ in range(3))
        self.table = self._integers(S, self.sizes.pages_per_slot)
        self.temperature, self.top_p, self.min_p = (torch.zeros(S, device=self.device) for _ in range(3))
        self.top_k, self.seed = self._integers(S), self._integers(S, 2)
        self.scratch = self.sizes.num_pages * self.sizes.page_size

    def _integers(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def admit(self, admit: Admit, vocab_size: int) -> None:
        """A sequence takes its slot."""
        slot, s = admit.slot, admit.sampling
        assert s.seed is not None, "the engine resolves seeds"
        # Either all draft keys of the cached pages are usable, or none: then the first stands one index behind them.
        draft_end = max(admit.num_hit, admit.first_draft_key)
        rules = Rules(admit, vocab_size, self.device) if s.changes_logits or admit.bad_words else None
        self.hosts[slot] = HostSlot(
            admit, draft_end=draft_end, num_prompt_logprobs=admit.num_prompt_logprobs, rules=rules
        )
        self.history[slot, : len(admit.tokens)] = torch.tensor(admit.tokens, device=self.device)
        self.first_draft_key[slot] = admit.first_draft_key
        self.draft_end[slot] = draft_end
        self.temperature[slot], self.top_p[slot], self.min_p[slot] = s.temperature, s.top_p, s.min_p
        self.top_k[slot] = s.top_k
        self.seed[slot] = torch.from_numpy(np.array([s.seed], np.uint64).view(np.int32))

    def set_pages(self, change: Pages) -> None:
        """Enter pages in a slot's table."""
        end = change.first + len(change.pages)
        self.table[change.slot, change.first : end] = torch.tensor(change.pages, device=self.device)

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

"""What changes a sequence's logits before a token is drawn: penalties, bias, min_tokens, bad words, the host's edits,
token masks.

Applied to every node with the tokens of the node's own path, so that a node's logits are those that the same text
would have if it were decoded without a tree.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from aquiline.backends.base import Admit, RowEdits


class Rules:
    """The rules of one sequence. counts [V], on the device: how often each token stands in its output so far."""

    def __init__(self, admit: Admit, vocab_size: int, device: torch.device) -> None:
        self.sampling, self.num_prompt, self.bad_words = admit.sampling, admit.num_prompt, admit.bad_words
        tokens = torch.tensor(admit.tokens, device=device)
        self.in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt[tokens[: admit.num_prompt]] = True
        self.counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
        output = tokens[admit.num_prompt :]
        self.count(output, torch.ones_like(output, dtype=torch.bool))
        self.bias = torch.zeros(vocab_size, device=device)
        for token, bias in admit.sampling.logit_bias.items():
            self.bias[token] = bias
        self.is_end = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.is_end[list(admit.end_token_ids)] = True

    @property
    def max_back(self) -> int:
        """How many tokens before the one to be drawn must be known in order: those of the longest bad word but its
        last."""
        return max((len(word) - 1 for word in self.bad_words), default=0)

    def count(self, tokens: Tensor, is_real: Tensor) -> None:
        """Count output tokens [n] where is_real [n]; a token of -1 is not counted."""
        self.counts.scatter_add_(0, tokens.clamp(min=0), (is_real & (tokens >= 0)).to(self.counts.dtype))

    def apply(self, logits: Tensor, on_path: Tensor, tokens: Tensor, index: Tensor, back: Tensor) -> Tensor:
        """Changed logits [N, V] of the nodes of one tree.

        on_path [N, N]: whether node m lies on the path of node n; False for the root, which is counted already. tokens
        [N]: the nodes' tokens. index [N]: the index of the token to be drawn. back [N, max_back]: the tokens before the
        one to be drawn, the last first."""
        s = self.sampling
        counts = self.counts.expand(len(logits), -1).scatter_add(
            1, tokens.expand(len(logits), -1), on_path.to(self.counts.dtype)
        )
        if s.repetition_penalty != 1:
            penalised = torch.where(logits > 0, logits / s.repetition_penalty, logits * s.repetition_penalty)
            logits = torch.where(self.in_prompt | (counts > 0), penalised, logits)
        logits = logits - s.presence_penalty * (counts > 0).float()
        logits = logits - s.frequency_penalty * counts.float() + self.bias
        if s.min_tokens:
            is_early = (index - self.num_prompt < s.min_tokens)[:, None]
            logits = logits.masked_fill(is_early & self.is_end, -math.inf)
        for word in self.bad_words:
            begun = torch.ones(len(logits), dtype=torch.bool, device=logits.device)
            for steps_back, token in enumerate(reversed(word[:-1])):
                begun &= back[:, steps_back] == token
            column = logits[:, word[-1]].masked_fill(begun, -math.inf)
            logits = logits.index_copy(1, torch.tensor([word[-1]], device=logits.device), column[:, None])
        return logits


def mask_tokens(logits: Tensor, masks: Tensor) -> Tensor:
    """Logits [R, V] with -inf for every token whose bit in masks [R, ceil(V / 32)] is 0."""
    places = torch.arange(logits.shape[1], device=logits.device)
    bits = (masks.long()[:, places // 32] >> (places % 32)) & 1
    return logits.masked_fill(bits == 0, -math.inf)


class RowChanges(NamedTuple):
    """What the host changes of the rows that draw. masks [R, ceil(V / 32)], on the device; edits of the same rows:
    those of Backend.verify, or none."""

    masks: Tensor | None = None
    edits: RowEdits = ()

    def take(self, first: int, end: int | None = None) -> RowChanges:
        """Those of rows [first, end)."""
        return RowChanges(None if self.masks is None else self.masks[first:end], self.edits[first:end])

    def apply(self, logits: Tensor) -> Tensor:
        """Changed logits [R, V]. Waits for the device where there are edits."""
        if any(self.edits):
            changed = logits.to("cpu", torch.float32, copy=True)
            for values, edit in zip(changed.numpy(), self.edits, strict=True):
                if edit is not None:
                    edit(values)
            logits = changed.to(logits)
        return logits if self.masks is None else mask_tokens(logits, self.masks)

"""The models as backends/torch calls them, launched kernel by kernel: prompts, and steps that no program holds.

The rows of a forward are padded to a power of two, for which its launches are built once. A row has the same bits in
every forward, so a text does not depend on which of its steps ran here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from aquiline.backends.gpu.forward import DraftForward, TargetForward, Workspace, fuse
from aquiline.backends.gpu.pages import EagerRows, RowBuffers, bucket
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.backends.torch.decoder import DecoderOutput
from aquiline.backends.torch.ranks import ALONE
from aquiline.backends.torch.slot_state import RowSampling
from aquiline.config import MAX_DEPTH
from aquiline.ops.triton.head_draw import DrawRows, TileBest, VocabularyHead, best_of_logits, head_logits, pick_draws
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.norm import norm


def run(launches: list[Launch]) -> None:
    """Issue launches one by one."""
    for launch in launches:
        launch.run()


class EagerModel(ABC):
    """What both models have: forwards by their shape, and logits."""

    ranks = ALONE

    def __init__(self, model: DeviceModel, workspace: Workspace) -> None:
        self.model, self.workspace = model, workspace
        self._forwards: dict[tuple[int, ...], tuple[Any, list[Launch]]] = {}

    def _pieces(self, rows: EagerRows) -> Iterator[tuple[Any, list[Launch], slice]]:
        """For each piece of the rows the forward that holds it, filled, with its launches."""
        levels, context = MAX_DEPTH * bool(rows.path.shape[1]), bucket(rows.longest)
        for piece in rows.pieces(self.model.config.experts):
            count = bucket(rows.columns[0, piece].shape[0])
            key = count, levels, rows.group
            forward, launches = self._forwards.get(key, (None, []))
            if forward is None or forward.context < context:
                forward = self._new(rows, RowBuffers.new(rows.pages.state, count, levels, rows.group), context)
                self._forwards[key] = forward, (launches := forward.launches())
            rows.fill(forward.at, piece)
            yield forward, launches, piece

    @abstractmethod
    def _new(self, rows: EagerRows, at: RowBuffers, context: int) -> Any:
        """A forward over these buffers, with room for a context."""

    def logits(self, hidden: Tensor, is_whole: bool = True) -> Tensor:
        """Final norm and head of hidden float32 [n, H] -> float32 [n, V]."""
        model, n = self.model, len(hidden)
        slots = torch.zeros(n, dtype=torch.int32, device=hidden.device)
        normed, logits = hidden.new_empty(hidden.shape, dtype=model.dtype), hidden.new_empty(n, len(model.head))
        V, H = model.head.shape
        hidden, tiles = hidden.contiguous(), self.workspace.table.head(V, H, model.dtype)
        run([
            norm("LM_HEAD.norm", hidden, model.final_norm, normed, slots, eps=model.config.rms_norm_eps),
            head_logits(normed, VocabularyHead(model.head), slots, logits, tiles),
        ])  # fmt: skip
        return logits


class EagerTarget(EagerModel):
    """The target, as TorchBackend calls a Decoder."""

    def __init__(self, model: DeviceModel, workspace: Workspace) -> None:
        super().__init__(model, workspace)
        self.config, self.embed = model.config, model.embed

    def _new(self, rows: EagerRows, at: RowBuffers, context: int) -> TargetForward:
        return TargetForward(self.model, rows.pages, at, context, self.workspace)

    def __call__(self, tokens: Tensor, positions: Tensor, rows: EagerRows) -> DecoderOutput:
        """As Decoder.forward; the rows bring their tokens and positions."""
        M = rows.columns.shape[1]
        hidden = torch.empty(M, self.config.hidden_size, device=tokens.device)
        width = len(self.model.capture) * self.config.hidden_size
        features = torch.empty(M, width, dtype=self.model.dtype, device=tokens.device)
        for forward, launches, piece in self._pieces(rows):
            run(launches)
            own = hidden[piece]
            own.copy_(forward.hidden[: len(own)])
            features[piece] = forward.features[: len(own)]
        return DecoderOutput(hidden[rows.places], features[rows.places])


class EagerDraft(EagerModel):
    """The draft head, as TorchBackend calls a DraftHead."""

    def __init__(self, draft: DeviceDraft, workspace: Workspace) -> None:
        super().__init__(draft.model, workspace)
        self.draft, self.config = draft, draft.config

    def _new(self, rows: EagerRows, at: RowBuffers, context: int) -> DraftForward:
        return DraftForward(self.draft, rows.pages, at, context, self.workspace)

    def __call__(self, g: Tensor, tokens: Tensor, positions: Tensor, rows: EagerRows) -> Tensor:
        """As DraftHead.forward; the rows bring their tokens and positions."""
        given = g.new_zeros(rows.columns.shape[1], g.shape[1])
        given[rows.places] = g
        output = torch.empty_like(given)
        for forward, launches, piece in self._pieces(rows):
            own = given[piece]
            forward.given[: len(own)] = own
            run(launches)
            output[piece] = forward.hidden[: len(own)]
        return output[rows.places]

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [n, C * Ht] -> g float32 [n, H]."""
        slots = torch.zeros(len(features), dtype=torch.int32, device=features.device)
        out = torch.empty(len(features), self.model.config.hidden_size, device=features.device)
        run(fuse(self.draft, features.to(self.model.dtype, copy=True), slots, out, self.workspace))
        return out

    def feedback(self, output: Tensor) -> Tensor:
        """What the next pass takes as its g."""
        if not self.config.norm_feedback:
            return output
        slots = torch.zeros(len(output), dtype=torch.int32, device=output.device)
        normed, eps = torch.empty_like(output), self.model.config.rms_norm_eps
        run([norm("EAGLE_DRAFT_LM_HEAD.norm", output.contiguous(), self.model.final_norm, normed, slots, eps=eps)])
        return normed

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft ids [...] -> target ids [...]."""
        return self.draft.target_ids.long()[draft_ids]


def draw(logits: Tensor, sampling: RowSampling) -> Tensor:
    """The target's own token of each row of logits float32 [n, V], by the kernels of the programs: [n] int64."""
    n, V = logits.shape
    rows = torch.arange(n, dtype=torch.int32, device=logits.device)
    seed = torch.where(sampling.seed >= 1 << 31, sampling.seed - (1 << 32), sampling.seed).int()
    own = DrawRows(rows, sampling.position.int(), sampling.temperature.contiguous(), seed.contiguous(), ahead=0)
    best, tokens = TileBest.new(n, V, 1, logits.device), torch.empty_like(rows)
    run([best_of_logits(logits.contiguous(), own, best), pick_draws(best, rows, tokens)])
    return tokens.long()

"""Steps on a GPU. What a program holds runs as one; the rest takes the torch backend's way over the same kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.backends.base import Sizes
from aquiline.backends.gpu.eager import EagerDraft, EagerTarget, draw
from aquiline.backends.gpu.forward import Workspace
from aquiline.backends.gpu.pages import GpuPages
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.backends.torch.draw import filtered
from aquiline.backends.torch.slot_state import RowSampling
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.ops.triton.attention import AttentionTiles


class GpuBackend(TorchBackend):
    """Steps over storage on one device. See backends/base.py for what each method promises."""

    pages = GpuPages

    def __init__(
        self, target: DeviceModel, draft: DeviceDraft | None, kv_dtype: torch.dtype, sizes: Sizes, tiles: AttentionTiles
    ) -> None:  # fmt: skip
        workspace = Workspace(torch.empty(0, device=target.embed.device), tiles)
        head = None if draft is None else EagerDraft(draft, workspace)
        super().__init__(EagerTarget(target, workspace), head, kv_dtype, sizes)

    def _draw(self, logits: Tensor, sampling: RowSampling) -> Tensor:
        return draw(filtered(logits, sampling) if sampling.filters else logits, sampling)

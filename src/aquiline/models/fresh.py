"""A new draft head for a target, ready to be trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from aquiline.models.config import DraftConfig, ModelConfig, default_capture
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.models.files import parameters_in
from aquiline.models.formats import check_d2t, share_embedding
from aquiline.types import storage_dtype

_STD = 0.02  # initializer_range of every Llama-like config


def new_draft(
    target: Decoder,
    *,
    target_ids: Sequence[int] | Tensor | None = None,
    capture: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    eagle31: bool = False,
    dtype: str = "float32",
    seed: int = 0,
) -> DraftHead:
    """An untrained head: hidden size, head_dim, norm epsilon, RoPE and positions are the target's, no sliding window.

    `target_ids` is the draft vocabulary, ascending target ids (None: all of it). `capture` defaults to
    default_capture. fc starts as the mean of the captured features, the layer small and normal, norms at 1 except the
    last, which with the head's rows is copied from the target: the first logits are those of the averaged features
    read by the target's own head. `eagle31` adds one norm per captured feature and feeds the normed output back. The
    embedding is the target's, frozen. Raises ValueError for a vocabulary or geometry that does not fit."""
    t = target.config
    layers = default_capture(t.num_layers) if capture is None else tuple(capture)
    if not layers or list(layers) != sorted({i for i in layers if 0 <= i < t.num_layers}):
        raise ValueError(f"capture={capture}: name ascending layers of 0 .. {t.num_layers - 1}")
    model = replace(
        t, family="llama", num_layers=1, qkv_bias=False, qk_norm=False, tied_head=False, windows=(),
        intermediate_size=intermediate_size or t.intermediate_size, num_heads=num_heads or t.num_heads,
        num_kv_heads=num_kv_heads or t.num_kv_heads,
    )  # fmt: skip
    if model.num_heads % model.num_kv_heads:
        raise ValueError(f"num_heads={model.num_heads} must be a multiple of num_kv_heads={model.num_kv_heads}")
    ids = _vocabulary(target_ids, t)
    config = DraftConfig(model, len(ids), t.hidden_size, layers, fc_norm=eagle31, norm_feedback=eagle31)
    with parameters_in(storage_dtype(dtype)):
        head = DraftHead(config)
    head.d2t.copy_(ids - torch.arange(len(ids)))
    _initialise(head, torch.Generator().manual_seed(seed))
    head.norm.data.copy_(target.final_norm.data)
    head.head.data.copy_(target.head.data[ids.to(target.head.device)])
    share_embedding(head, target)
    return head


def _vocabulary(target_ids: Sequence[int] | Tensor | None, target: ModelConfig) -> Tensor:
    if target_ids is None:
        return torch.arange(target.vocab_size)
    ids = torch.as_tensor(target_ids, dtype=torch.int64).cpu()
    problems: list[str] = [] if len(ids) else ["it is empty"]
    check_d2t(ids - torch.arange(len(ids)), target.vocab_size, problems)
    if problems:
        raise ValueError(f"target_ids: {'; '.join(problems)}")
    return ids


def _initialise(head: DraftHead, generator: torch.Generator) -> None:
    shared = {"embed", "head"}
    for name, parameter in head.named_parameters():
        if name in shared:
            continue
        if name == "fc":
            eye, parts = torch.eye(parameter.shape[0]), len(head.config.capture)
            parameter.data.copy_(torch.cat([eye / parts] * parts, dim=1))
        elif name.endswith("norm"):
            parameter.data.fill_(1.0)
        else:
            scale = _STD / 2**0.5 if name in ("layer.o", "layer.down") else _STD  # they write to the residual
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * scale)

"""Weights on the device: linears and embeddings in one dtype, norms, biases and sinks in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.blocks import Array, Parts, floats_of
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights, MoeWeights
from aquiline.ops.torch_arrays import tensor_of
from aquiline.ops.triton.experts import ExpertBlocks

OF_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")

Layer = dict[str, Tensor]
"""The weights of a layer by their names in models/model_weights.py, without those that it does not have, and without
experts."""


@dataclass(frozen=True, eq=False)
class DeviceStorage:
    """Where weights go, and in which dtype linears and embeddings are stored."""

    dtype: torch.dtype
    device: torch.device

    def put(self, weight: Parts | Array) -> Tensor:
        """A linear or an embedding in the dtype; a norm, a bias or sinks in float32."""
        if isinstance(weight, tuple):
            return tensor_of(floats_of(weight)).to(self.device, self.dtype).contiguous()
        return tensor_of(weight).to(self.device, torch.float32).contiguous()

    def experts(self, weights: MoeWeights) -> tuple[ExpertBlocks, ExpertBlocks]:
        """Gate and up, and down, of all experts, which stay packed; read one by one."""
        found = []
        for parts, bias in ((weights.gate_up, weights.gate_up_bias), (weights.down, weights.down_bias)):
            blocks = torch.empty(len(parts), *parts[0].values.shape, dtype=torch.uint8, device=self.device)
            for own, part in zip(blocks, parts, strict=True):
                own.copy_(tensor_of(part.values))
            found.append(ExpertBlocks.of(blocks, None if bias is None else self.put(bias)))
        return found[0], found[1]


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """One decoder. embed and head [V, H] (a draft's head: [Vd, H]); layers; final_norm [H]; capture: the layers whose
    outputs are features; experts: gate and up, and down, of each layer, where there are any."""

    config: ModelConfig
    dtype: torch.dtype
    embed: Tensor
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: Tensor
    capture: tuple[int, ...]
    experts: tuple[tuple[ExpertBlocks, ExpertBlocks], ...]

    @classmethod
    def of(cls, weights: ModelWeights, storage: DeviceStorage, embed: Tensor | None = None) -> DeviceModel:
        """The weights, read one by one. embed: the embedding that a draft shares with its target."""
        table = storage.put(weights.embed) if embed is None else embed
        experts = tuple(storage.experts(own.mlp) for own in weights.layers if isinstance(own.mlp, MoeWeights))
        layers = tuple(
            {name: storage.put(own) for name, own in layer.named() if not (experts and name in OF_EXPERTS)}
            for layer in weights.layers
        )
        head = table if weights.head is weights.embed else storage.put(weights.head)
        return cls(
            weights.config, storage.dtype, table, layers, storage.put(weights.final_norm), head, weights.capture,
            experts,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class DeviceDraft:
    """A draft head. model: its one layer, embedding, norm and head; fc [H, C Ht]; target_ids int32 [Vd]: the target's
    id of each of the draft's; input_norm [C Ht] and fc_norm [C, Ht] as in DraftWeights."""

    config: DraftConfig
    model: DeviceModel
    fc: Tensor
    target_ids: Tensor
    input_norm: Tensor | None
    fc_norm: Tensor | None

    @classmethod
    def of(cls, draft: DraftWeights, storage: DeviceStorage, target: ModelWeights, embed: Tensor) -> DeviceDraft:
        """The weights, read one by one. embed: the target's embedding, which the draft may share."""
        shared = embed if draft.model.embed is target.embed else None
        ids = torch.arange(draft.config.draft_vocab_size) + tensor_of(draft.d2t)
        norms = (None if own is None else storage.put(own) for own in (draft.input_norm, draft.fc_norm))
        return cls(
            draft.config, DeviceModel.of(draft.model, storage, shared), storage.put(draft.fc),
            ids.int().to(storage.device), *norms,
        )  # fmt: skip

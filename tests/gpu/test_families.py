"""Targets with every part that a family may have, on kernels and in torch: the same trees and texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from tests.backends.playing import SAMPLED, WAYS, words
from tests.conftest import GEMMA
from tests.gpu.pairs import MINI, new_player, new_table, told, weights
from tests.gpu.running import DEVICE
from tests.gpu.test_packed_experts import random_blocks

from aquiline.backends.gpu.gpu_pair import GpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.blocks import MXFP4, Parts, in_memory
from aquiline.models.model_config import Experts
from aquiline.models.model_weights import LayerWeights, ModelWeights, MoeWeights

GPT_OSS: dict[str, Any] = {
    "qkv_bias": True, "o_bias": True, "sinks": True, "windows": (5, 0), "experts": Experts(16, 2, has_bias=True),
    "activation": "clamped", "activation_limit": 7.0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {"gpt-oss": GPT_OSS, "gemma3": GEMMA | {"windows": (5, 0)}}


def packed(count: int, rows: int, seed: int) -> Parts:
    """Experts in MXFP4, as checkpoints have them."""
    return tuple(in_memory(blocks.cpu().numpy(), MXFP4) for blocks in random_blocks(count, rows, 32, seed))


def with_packed_experts(target: ModelWeights) -> ModelWeights:
    def layer(own: LayerWeights, seed: int) -> LayerWeights:
        if not isinstance(own.mlp, MoeWeights):
            return own
        count = len(own.mlp.down)
        mlp = dataclasses.replace(own.mlp, gate_up=packed(count, 64, seed), down=packed(count, 32, seed + 1))
        return dataclasses.replace(own, mlp=mlp)

    return dataclasses.replace(target, layers=tuple(layer(own, 2 * i) for i, own in enumerate(target.layers)))


@pytest.mark.rare
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_trees_and_texts(family: str) -> None:
    target, draft = weights(dataclasses.replace(MINI, **FAMILIES[family]))
    target, played = with_packed_experts(target), []
    for pair in (
        GpuPair(target, draft, "float32", device=str(DEVICE), table=new_table()),
        TorchPair(target, draft, "float32"),
    ):
        player = new_player(pair)
        for way in ("chain3", "dynamic"):
            player.add(words(7, 2), WAYS[way], SAMPLED, chunk=4)
            player.step(), player.step(), player.step()
        played.append([told(text)[:2] for text in player.texts])
    assert played[0] == played[1]


def test_experts_that_are_not_packed() -> None:
    target, draft = weights(dataclasses.replace(MINI, **GPT_OSS))
    with pytest.raises(ValueError, match="family='llama': only experts in MXFP4 have kernels"):
        GpuPair(target, draft, "float32", device=str(DEVICE))

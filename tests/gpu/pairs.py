"""Pairs so small that a step takes tenths of a second in the interpreter, and what is played on them."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import Any

from tests.backends.playing import Player, Text
from tests.conftest import TINY, TINY_DRAFT, tiny_pair, weights_of
from tests.gpu.running import DEVICE

from aquiline.backends.base import Decoded
from aquiline.backends.gpu.gpu_backend import GpuBackend
from aquiline.backends.gpu.gpu_pair import GpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.models.model_config import DraftConfig, ModelConfig
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.ops.triton.attention import AttentionTiles
from aquiline.ops.triton.tile_table import TileEntry, TileKey, TileTable

MINI = dataclasses.replace(
    TINY, hidden_size=32, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1
)  # fmt: skip
MINI_DRAFT = dataclasses.replace(
    TINY_DRAFT, model=dataclasses.replace(MINI, num_layers=1), target_hidden_size=32, capture=(0, 1)
)  # fmt: skip


class Tuned(dict[TileKey, TileEntry]):
    """An entry for every shape, with spans of one block: a long span costs the interpreter as much where nothing is
    seen."""

    def get(self, key: TileKey, default: Any = None) -> TileEntry:
        return TileEntry(AttentionTiles(span=64, block=64) if key.kind == "attention" else key.default, 1.0, 1.0)


def new_table() -> TileTable:
    return TileTable("here", Tuned())


def weights(target: ModelConfig = MINI, draft: DraftConfig = MINI_DRAFT) -> tuple[ModelWeights, DraftWeights | None]:
    return weights_of(*tiny_pair(0, target, draft))


def new_gpu(*configs: Any, dtype: str = "float32") -> GpuPair:
    return GpuPair(*weights(*configs), dtype, device=str(DEVICE), table=new_table())


@lru_cache
def gpu_pair() -> GpuPair:
    return new_gpu()


@lru_cache
def twin_pair() -> TorchPair:
    return TorchPair(*weights(), "float32")


def new_player(pair: Any, num_slots: int = 4) -> Player:
    """A player whose pages are small, so that short texts cross them."""
    return Player(pair, num_slots, page_size=4, row_budget=16)


def backend_of(player: Player) -> GpuBackend:
    assert isinstance(player.backend, GpuBackend)
    return player.backend


def told(text: Text) -> tuple[list[int], Any, list[Decoded]]:
    """A text's tokens and trees, and what its steps told beside log-probabilities, which agree but for roundings."""
    return text.tokens, text.trees, [step._replace(logprobs=None) for step in text.steps]

"""Which backend runs a pair on this machine: decided once, logged, in every result; nothing falls back at run time."""

from __future__ import annotations

from aquiline.backends.base import Pair
from aquiline.backends.torch.pair import TorchPair
from aquiline.config import Environment
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead


def new_pair(
    decoder: Decoder, head: DraftHead | None, dtype: str, arithmetic: str, kv_dtype: str, device: str,
    environment: Environment,
) -> Pair:  # fmt: skip
    return TorchPair(decoder, head, dtype, kv_dtype, device)

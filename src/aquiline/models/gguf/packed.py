"""The weights of a GGUF file as the file has them: packed blocks stay packed, floats keep their dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from aquiline.blocks import BLOCK_TYPES, joined
from aquiline.errors import CheckpointError
from aquiline.models.decoder import Decoder
from aquiline.models.files import Entry, TensorSource, refuse
from aquiline.models.gguf.tensors import GGUFTensors

_FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16}


def keep_blocks(target: Decoder, tensors: TensorSource, entries: Iterable[Entry]) -> list[Entry]:
    """Give every weight in packed blocks to `target.packed`, and every other parameter the dtype that holds what the
    file has for it. Returns the entries that are still to be filled.

    A fused weight of blocks and floats becomes float32, and so does a gate and up of two types. Raises CheckpointError
    for a checkpoint that is no GGUF file, and listing every weight that is not finite."""
    if not isinstance(tensors, GGUFTensors):
        raise CheckpointError(f"{tensors.path}: dtype='packed' is for .gguf files; use 'bfloat16', 'int8' or 'int4'")
    by_parameter: dict[str, list[Entry]] = {}
    for entry in entries:
        by_parameter.setdefault(entry.target, []).append(entry)
    rest, problems = [], []
    for name, own in by_parameter.items():
        kinds = {tensors.dtype(entry.source) for entry in own}
        if kinds <= set(BLOCK_TYPES) and (len(kinds) == 1 or name.endswith("qkv")):
            weights = [tensors.blocks(entry.source) for entry in own]
            odd = [entry.source for entry, weight in zip(own, weights, strict=True) if not weight.is_finite()]
            problems += [f"tensor {source} has scales that are not finite: download it again" for source in odd]
            target.keep_packed(name, joined(weights))
        else:
            parameter = target.get_parameter(name)
            dtype = _FLOATS.get(kinds.pop(), torch.float32) if len(kinds) == 1 else torch.float32
            parameter.data = torch.empty_like(parameter, dtype=dtype)
            rest += own
    refuse(tensors.path, problems)
    return rest

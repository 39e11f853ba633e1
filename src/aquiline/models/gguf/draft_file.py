"""EAGLE-3 drafts as GGUF files, read and written: the metadata as fields of a config.json, the tensors by the names of
a checkpoint, and a writer for `aquiline convert` and for comparisons with llama.cpp.

Source: llama.cpp in llama-cpp-python 0.3.36, src/models/eagle3.cpp and conversion/llama.py; gguf-py 0.19 has no names
for this architecture.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.blocks import Array
from aquiline.errors import CheckpointError
from aquiline.models.gguf.metadata import decoder_fields, own_fields
from aquiline.models.gguf.reader import INTEGERS, GGUFFile
from aquiline.models.gguf.tensors import DRAFT_ARCHITECTURE, GGUFTensors, as_neighbours, gguf_name
from aquiline.models.gguf.writer import add_decoder, add_rope, add_tensor, finish
from aquiline.models.model_config import LAYER_IDS, DraftConfig

NUM_FEATURES = 3
"""How many layers of the target llama.cpp gives to a head."""
PROVENANCE = "provenance"
"""The field of a converted draft that says what it was converted from."""
_PROVENANCE_KEY = f"aquiline.{PROVENANCE}"
_MAP = "d2t"
_FLAGS = ("norm_before_residual", "norm_before_fc")
_LAYERS, _HIDDEN = "target_layers", "target_hidden_size"
_OWN = frozenset({_LAYERS, _HIDDEN, *_FLAGS})


def is_draft_file(gguf: GGUFFile) -> bool:
    """Whether a GGUF file is an EAGLE-3 draft."""
    return gguf.text("general.architecture") == DRAFT_ARCHITECTURE


def fields_of_draft(gguf: GGUFFile) -> dict[str, Any]:
    """The fields of the config.json that this draft would have; its layer ids count what enters a layer.

    Raises CheckpointError naming file, field and value for what is not supported."""
    found, own = decoder_fields(gguf, DRAFT_ARCHITECTURE, _OWN), own_fields(gguf, DRAFT_ARCHITECTURE)
    if _LAYERS not in own:
        raise CheckpointError(f"{gguf.path}: {DRAFT_ARCHITECTURE}.{_LAYERS} is missing; convert the draft again")
    mapped = gguf.tensors.get(_MAP)
    found |= {"model_type": "llama", LAYER_IDS: own[_LAYERS], _HIDDEN: own.get(_HIDDEN)}
    found |= {name: own.get(name) for name in _FLAGS}
    found |= {"draft_vocab_size": found["vocab_size"] if mapped is None else mapped.shape[0]}
    return found | {PROVENANCE: gguf.text(_PROVENANCE_KEY)}


class GGUFDraftTensors(GGUFTensors):
    """The tensors of a GGUF draft by a checkpoint's names, with d2t as offsets: the file has target ids."""

    def dtype(self, name: str) -> str:
        """How the file stores a tensor; I64 for d2t, whichever integers it has."""
        kind = super().dtype(name)
        return "I64" if name == _MAP and kind in INTEGERS else kind

    def get(self, name: str, index: int | None = None) -> Array:
        """As GGUFTensors.get; d2t as int64 offsets [Vd]."""
        if name != _MAP:
            return super().get(name, index)
        info = self._infos[name]
        ids = self._gguf.raw(info).view(f"<i{INTEGERS[info.type_name].num_bytes}").astype(np.int64)
        return ids - np.arange(len(ids))


@dataclass(frozen=True)
class GGUFDraft:
    """What a file is made of. tensors: floats in their own dtypes by a checkpoint's names with `layers.0`, and d2t as
    offsets; without lm_head or embed_tokens llama.cpp takes the target's. stored: how matrices are stored, one of
    STORED; None: as they are. provenance: what `aquiline convert` keeps for the way back."""

    config: DraftConfig
    tensors: Mapping[str, Array]
    stored: str | None = None
    provenance: str | None = None

    def write(self, file: Path) -> None:
        """Write the file. Vectors become float32."""
        from gguf import GGUFWriter

        model = self.config.model
        writer = GGUFWriter(file, DRAFT_ARCHITECTURE)
        add_decoder(writer, model)
        writer.add_array(f"{DRAFT_ARCHITECTURE}.{_LAYERS}", [layer + 1 for layer in self.config.capture])
        writer.add_uint32(f"{DRAFT_ARCHITECTURE}.{_HIDDEN}", self.config.target_hidden_size)
        for name in _FLAGS:
            writer.add_bool(f"{DRAFT_ARCHITECTURE}.{name}", getattr(self.config, name))
        if self.provenance is not None:
            writer.add_string(_PROVENANCE_KEY, self.provenance)
        attention = "layers.0.self_attn"
        heads = {f"{attention}.q_proj.weight": model.num_heads, f"{attention}.k_proj.weight": model.num_kv_heads}
        for name, values in self.tensors.items():
            if name == _MAP:
                writer.add_tensor(_MAP, values + np.arange(len(values)))  # not an offset, the id
            else:
                turned = as_neighbours(values, heads[name]) if name in heads else values
                add_tensor(writer, gguf_name(name), turned, self.stored)
        add_rope(writer, model)
        finish(writer)

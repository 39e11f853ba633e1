"""A checkpoint's parameters by name, put together from its tensors and rounded to their storage when they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import ml_dtypes
import numpy as np

from aquiline.blocks import (
    BLOCK_TYPES,
    FLOATS,
    PACKED,
    Array,
    Parts,
    Weight,
    all_finite,
    blocks_are_finite,
    joined,
)
from aquiline.errors import CheckpointError
from aquiline.models.files import Entry, TensorSource, refuse
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.types import Float32, storage_dtype

_OF_FILES = {"F16": FLOATS["float16"], "BF16": FLOATS["bfloat16"]}


class Parameters:
    """The parameters that checked entries fill, stored as the setting `dtype` says: one of FLOATS (int8 and int4 are
    rounded from bfloat16 later), or "packed": blocks stay blocks and floats keep the file's dtype.

    A tensor is read when its parameter is, one at a time, and must be finite as it is stored. Otherwise reading raises
    a CheckpointError that lists every tensor of the checkpoint that is not."""

    def __init__(self, tensors: TensorSource, entries: Sequence[Entry], dtype: str) -> None:
        """Raises CheckpointError for "packed" and a checkpoint that is no GGUF file."""
        if dtype == PACKED and not isinstance(tensors, GGUFTensors):
            raise CheckpointError(
                f"{tensors.path}: dtype='packed' is for .gguf files; use 'bfloat16', 'int8' or 'int4'"
            )
        self._tensors, self._dtype, self._entries = tensors, dtype, entries
        self._own: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: entry.start):
            self._own.setdefault(entry.target, []).append(entry)

    def vector(self, name: str) -> Array | None:
        """A norm or a bias now, [n]; None if the model has none of that name."""
        if name not in self._own:
            return None
        return np.concatenate([self._read(entry) for entry in self._own[name]])

    def needed(self, name: str) -> Array:
        """A norm that every model has."""
        found = self.vector(name)
        assert found is not None, name
        return found

    def matrix(self, name: str) -> Parts:
        """A linear or an embedding, to be read later. The parts of a fused one are joined where they are alike."""
        own = self._own[name]
        if self._stays_in_blocks(name):
            return joined([self._blocks(entry) for entry in own])
        num_rows = sum(entry.shape[0] for entry in own)
        return (Weight(self._stored(name).name, (num_rows, own[0].shape[1]), lambda: self._floats(own)),)

    def _kinds(self, name: str) -> set[str]:
        return {self._tensors.dtype(entry.source) for entry in self._own[name]}

    def _stays_in_blocks(self, name: str) -> bool:
        """Blocks of several types are kept for qkv alone: gate and up are interleaved row by row."""
        kinds = self._kinds(name)
        return self._dtype == PACKED and kinds <= set(BLOCK_TYPES) and (len(kinds) == 1 or name.endswith("qkv"))

    def _stored(self, name: str) -> np.dtype[np.generic]:
        """The dtype of a parameter of floats. "packed": the file's; float32 where blocks or dtypes are mixed in it."""
        if self._dtype != PACKED:
            return storage_dtype(self._dtype)
        kinds = self._kinds(name)
        return _OF_FILES.get(kinds.pop(), FLOATS["float32"]) if len(kinds) == 1 else FLOATS["float32"]

    def _blocks(self, entry: Entry) -> Weight:
        assert isinstance(self._tensors, GGUFTensors)
        weight = self._tensors.blocks(entry.source)

        def read() -> Array:
            blocks = weight.values
            if not blocks_are_finite(weight.kind, blocks):
                self._refuse()
            return blocks

        return Weight(weight.kind, weight.shape, read)

    def _floats(self, own: list[Entry]) -> Array:
        return self._read(own[0]) if len(own) == 1 else np.concatenate([self._read(entry) for entry in own])

    def _read(self, entry: Entry) -> Array:
        values = self._rounded(entry, self._tensors.get(entry.source))
        if not all_finite(values):
            self._refuse()
        return values

    def _rounded(self, entry: Entry, found: Array) -> Array:
        """A tensor as it is stored; what the storage cannot hold becomes infinite."""
        with np.errstate(over="ignore"):
            return found.astype(self._stored(entry.target), order="C", copy=False)

    def _refuse(self) -> NoReturn:
        """Read every tensor again and list those that are not finite as they are stored."""
        refuse(self._tensors.path, [problem for entry in self._entries if (problem := self._problem(entry))])
        raise CheckpointError(f"{self._tensors.path} changed while it was read; load it again")

    def _problem(self, entry: Entry) -> str | None:
        if self._stays_in_blocks(entry.target):
            assert isinstance(self._tensors, GGUFTensors)
            weight = self._tensors.blocks(entry.source)
            is_finite = blocks_are_finite(weight.kind, weight.values)
            return None if is_finite else f"tensor {entry.source} has scales that are not finite: download it again"
        found = self._tensors.get(entry.source)
        place = self._rounded(entry, found)
        return None if all_finite(place) else _not_finite(entry.source, place, found.astype(np.float32))


def _not_finite(name: str, place: Array, found: Float32) -> str:
    """The problem of a tensor whose values in `place` are not all finite. Either the file's own values (`found`) are
    not finite, or the storage dtype cannot hold them."""
    if np.isfinite(found).all():
        stored, wider = place.dtype.name, "bfloat16" if place.dtype == np.float16 else "float32"
        largest, limit = float(np.abs(found).max()), float(ml_dtypes.finfo(place.dtype).max)  # type: ignore[no-untyped-call]
        return f"tensor {name} holds {largest:g}, and {stored} ends at {limit:g}: use dtype={wider!r}"
    odd, nans = int((~np.isfinite(place)).sum()), int(np.isnan(place).sum())
    return (
        f"tensor {name} holds {odd} of {place.size} values that are not finite ({nans} NaN, {odd - nans} infinite): "
        "download it again, or save it again from a sound run"
    )

"""A checkpoint's parameters by name, put together from its tensors and rounded to their storage when they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NoReturn

import ml_dtypes
import numpy as np

from aquiline.blocks import (
    BLOCK_TYPES,
    FLOATS,
    GGUF_BLOCKS,
    MXFP4,
    MXFP4_LARGEST,
    PACKED,
    Array,
    Parts,
    Weight,
    all_finite,
    blocks_are_finite,
    joined,
    mxfp4_blocks,
)
from aquiline.errors import CheckpointError
from aquiline.models.files import Entry, Tensors, TensorSource, refuse
from aquiline.models.gguf.tensors import GGUFTensors
from aquiline.types import Float32, storage_dtype

OF_FILES = {"F32": FLOATS["float32"], "F16": FLOATS["float16"], "BF16": FLOATS["bfloat16"]} | FLOATS
"""The dtypes of floats by their names in files."""


class Parameters:
    """The parameters that checked entries fill, stored as the setting `dtype` says: one of FLOATS (int8 and int4 are
    rounded from bfloat16 later), or "packed": blocks stay blocks and floats keep the file's dtype. Experts in MXFP4
    stay blocks in any case.

    A tensor is read when its parameter is, one tensor or one expert at a time, and must be finite as it is stored.
    Otherwise reading raises a CheckpointError that lists every tensor of the checkpoint that is not."""

    def __init__(self, tensors: TensorSource, entries: Sequence[Entry], dtype: str) -> None:
        """Raises CheckpointError for "packed" and a checkpoint without blocks that is no GGUF file."""
        has_blocks = isinstance(tensors, GGUFTensors) or any(entry.holds == "nibbles" for entry in entries)
        if dtype == PACKED and not has_blocks:
            raise CheckpointError(
                f"{tensors.path}: dtype='packed' is for .gguf files and experts in MXFP4; use 'bfloat16', 'int8' or "
                "'int4'"
            )
        self._tensors, self._dtype, self._entries = tensors, dtype, entries
        self._own: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda entry: entry.start):
            self._own.setdefault(entry.target, []).append(entry)

    def vector(self, name: str) -> Array | None:
        """A norm or a bias now, [n], or the biases of all experts, [E, n]; None if the model has none of that name."""
        if name not in self._own:
            return None
        return np.concatenate([self._read(entry) for entry in self._own[name]], axis=-1)

    def needed(self, name: str) -> Array:
        """A norm that every model has."""
        found = self.vector(name)
        assert found is not None, name
        return found

    def experts(self, name: str, num_experts: int) -> Parts:
        """A linear of every expert, each to be read later on its own."""
        if name in self._own:
            found = [self.matrix(name, expert) for expert in range(num_experts)]
        else:
            found = [self.matrix(f"{name}.{expert}") for expert in range(num_experts)]
        return tuple(weight for (weight,) in found)

    def matrix(self, name: str, expert: int | None = None) -> Parts:
        """A linear or an embedding, or one expert's of a stack, to be read later. The parts of a fused one are joined
        where they are alike."""
        own = self._own[name]
        if own[0].holds != "floats":
            return (self._mxfp4(own[0], own[1], expert),)
        if self._stays_in_blocks(name):
            return joined([self._blocks(entry, expert) for entry in own])
        rows = sum(entry.matrix_shape[0] for entry in own)
        shape = rows, own[0].matrix_shape[1]
        has_rows = isinstance(self._tensors, Tensors) and not (own[0].is_stacked or own[0].pairs)
        read_rows = partial(self._rows, own) if has_rows else None
        return (Weight(self._stored(name).name, shape, lambda: self._floats(own, expert), read_rows),)

    def _kinds(self, name: str) -> set[str]:
        return {self._tensors.dtype(entry.source) for entry in self._own[name]}

    def _stays_in_blocks(self, name: str) -> bool:
        """Blocks of several types are kept for qkv alone: gate and up are interleaved row by row."""
        kinds = self._kinds(name)
        if kinds == {MXFP4} and self._own[name][0].is_stacked:
            return True
        return self._dtype == PACKED and kinds <= set(BLOCK_TYPES) and (len(kinds) == 1 or name.endswith("qkv"))

    def _stored(self, name: str) -> np.dtype[np.generic]:
        """The dtype of a parameter of floats. "packed": the file's; float32 where blocks or dtypes are mixed in it."""
        if self._dtype != PACKED:
            return storage_dtype(self._dtype)
        kinds = self._kinds(name)
        return OF_FILES.get(kinds.pop(), FLOATS["float32"]) if len(kinds) == 1 else FLOATS["float32"]

    def _blocks(self, entry: Entry, expert: int | None) -> Weight:
        assert isinstance(self._tensors, GGUFTensors)
        weight = self._tensors.blocks(entry.source, expert)
        return Weight(weight.kind, weight.shape, lambda: self._sound(weight.kind, weight.values))

    def _mxfp4(self, nibbles: Entry, scales: Entry, expert: int | None) -> Weight:
        """An expert whose nibbles and scales are tensors of their own."""
        num_rows, num_blocks = scales.matrix_shape

        def read() -> Array:
            return self._sound(MXFP4, mxfp4_blocks(self._found(nibbles, expert), self._found(scales, expert)))

        return Weight(MXFP4, (num_rows, num_blocks * GGUF_BLOCKS[MXFP4].inputs), read)

    def _sound(self, kind: str, blocks: Array) -> Array:
        if not blocks_are_finite(kind, blocks):
            self._refuse()
        return blocks

    def _floats(self, own: list[Entry], expert: int | None) -> Array:
        found = [self._read(entry, expert) for entry in own]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _rows(self, own: list[Entry], rows: slice) -> Array:
        """Rows of a linear that each lie in one of its tensors or go on in the next."""
        found = []
        for entry in own:
            first, end = (min(max(at - entry.start, 0), entry.shape[0]) for at in (rows.start, rows.stop))
            found += [self._read(entry, slice(first, end))] if first < end else []
        return np.concatenate(found)

    def _read(self, entry: Entry, expert: int | slice | None = None) -> Array:
        values = self._rounded(entry, self._found(entry, expert))
        if not all_finite(values):
            self._refuse()
        return values

    def _found(self, entry: Entry, expert: int | slice | None) -> Array:
        """A tensor, some rows of it or one expert's, outputs first, those of gate before those of up."""
        if isinstance(expert, slice):
            assert isinstance(self._tensors, Tensors)
            return self._tensors.get(entry.source, expert)
        found = self._tensors.get(entry.source, expert)
        if entry.pairs is not None:
            ends = found.shape[entry.pairs]
            found = found.take(np.r_[0:ends:2, 1:ends:2], axis=entry.pairs)
        return found.T if entry.is_transposed else found

    def _rounded(self, entry: Entry, found: Array) -> Array:
        """A tensor as it is stored; what the storage cannot hold becomes infinite."""
        if entry.offset is not None:
            return found.astype(np.float32, order="C") + np.float32(entry.offset)
        with np.errstate(over="ignore"):
            return found.astype(self._stored(entry.target), order="C", copy=False)

    def _refuse(self) -> NoReturn:
        """Read every tensor again and list those that are not finite as they are stored."""
        refuse(self._tensors.path, [problem for entry in self._entries for problem in self._problems(entry)])
        raise CheckpointError(f"{self._tensors.path} changed while it was read; load it again")

    def _problems(self, entry: Entry) -> Iterator[str]:
        """The problem of a tensor, or of each expert's part of it."""
        for expert in range(entry.shape[0]) if entry.is_stacked else (None,):
            name = entry.source if expert is None else f"{entry.source}[{expert}]"
            problem = self._problem(entry, expert, name)
            if problem is not None:
                yield problem

    def _problem(self, entry: Entry, expert: int | None, name: str) -> str | None:
        if entry.holds == "nibbles":
            return None
        if entry.holds == "scales":
            is_finite = not (self._found(entry, expert) > MXFP4_LARGEST).any()
        elif self._stays_in_blocks(entry.target):
            assert isinstance(self._tensors, GGUFTensors)
            weight = self._tensors.blocks(entry.source, expert)
            is_finite = blocks_are_finite(weight.kind, weight.values)
        else:
            found = self._found(entry, expert)
            place = self._rounded(entry, found)
            return None if all_finite(place) else _not_finite(name, place, found.astype(np.float32))
        return None if is_finite else f"tensor {name} has scales that are not finite: download it again"


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

"""A GGUF file: its metadata through a memory map, and its tensors read one by one, so that none stays in memory.

Knows nothing of architectures. gguf-py's own reader makes an array of every element of the metadata, which takes 4 s
for a vocabulary of 49,152 tokens with its merges. This reader walks over strings and decodes them when they are asked
for.

Source: ggml-org/ggml docs/gguf.md, versions 2 and 3; gguf-py 0.19 constants.py.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aquiline.blocks import GGUF_BLOCKS, GGUF_FLOATS, StoredType
from aquiline.errors import CheckpointError

INTEGERS = {"I32": StoredType(26, 1, 4), "I64": StoredType(27, 1, 8)}
"""The types of maps between vocabularies."""
_TYPES = GGUF_FLOATS | GGUF_BLOCKS | INTEGERS
VERSIONS = (2, 3)
_MAGIC = b"GGUF"
_ALIGNMENT = 32
_MAX_DIMS = 4
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
"""Types of metadata by their numbers: the form of a scalar, as struct has it."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: shape in torch's order, type by its number in the file, where its bytes begin.

    A row of `shape[-1]` values takes row_bytes; 0 for a type that is not read."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    row_bytes: int

    @property
    def type_name(self) -> str:
        """The type as GGUF names it: F32, Q4_K, ..."""
        own = {kind.number: name for name, kind in _TYPES.items()}
        return own.get(self.type_id) or _other_type(self.type_id)

    @property
    def num_bytes(self) -> int:
        """What the tensor takes in the file."""
        return math.prod(self.shape[:-1]) * self.row_bytes


def _other_type(number: int) -> str:
    """The name of a type that is not read."""
    from gguf import GGMLQuantizationType

    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(number, f"number {number}")


class Strings:
    """An array of strings in the metadata, decoded whenever it is iterated over."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        read, data, at = struct.Struct("<Q").unpack_from, self._data, self._start
        for _ in range(self._count):
            start = at + 8
            at = start + read(data, at)[0]
            yield data[start:at].decode("utf-8")


class GGUFFile:
    """An open GGUF file. `fields` are its metadata: numbers, booleans, strings, lists and `Strings`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        cursor = _Cursor(self._data)
        num_tensors, num_fields = _header(cursor, path)
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            name = cursor.string()
            self.fields[name] = cursor.value(cursor.number("I"))
        self.tensors = _tensors(cursor, num_tensors, self.fields.get("general.alignment", _ALIGNMENT))

    def raw(self, info: TensorInfo) -> NDArray[np.uint8]:
        """A tensor's bytes, uint8 [..., row_bytes], as a view of the file's mapping, to be copied or packed at once: a
        copy of all tensors, one by one, would take a third of the time of packing them. What earlier calls have read
        leaves this process's memory; it stays in the system's file cache."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._data.madvise(mmap.MADV_DONTNEED)
        data = np.frombuffer(self._data, np.uint8, info.num_bytes, info.start)
        return data.reshape(*info.shape[:-1], info.row_bytes)

    def text(self, key: str) -> str | None:
        """A string of the metadata, None without it. Raises CheckpointError if it is something else."""
        value = self.fields.get(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.path}: {key}={value!r} must be a string")
        return value

    def strings(self, key: str) -> list[str]:
        """A list of strings of the metadata. Raises CheckpointError if it is missing or something else."""
        value = self.fields.get(key)
        if not isinstance(value, Strings):
            raise CheckpointError(f"{self.path}: {key} must be a list of strings, and it is {_shown(value)}")
        try:
            return list(value)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {key} holds a string that is not UTF-8 ({error})") from None

    def flag(self, key: str, default: bool) -> bool:
        """True or false; `default` without it. Raises CheckpointError if it is something else."""
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.path}: {key}={value!r} must be true or false")
        return value

    def numbers(self, key: str, length: int) -> list[Any]:
        """A list of `length` numbers of the metadata. Raises CheckpointError if it is anything else."""
        value = self.fields.get(key)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(v, int | float) for v in value):
            raise CheckpointError(f"{self.path}: {key} must be a list of {length} numbers, and it is {_shown(value)}")
        return value


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file and read all but the tensors' contents. While it does not change it is read once.

    Raises CheckpointError for a file that is truncated or corrupt, of another version, or big-endian."""
    state = path.stat()
    try:
        return _opened(path, state.st_mtime_ns, state.st_size)
    except (EOFError, OverflowError, UnicodeDecodeError, ValueError, struct.error) as error:
        raise CheckpointError(f"{path} is truncated or corrupt ({error}); download it again") from error


@lru_cache(maxsize=2)
def _opened(path: Path, modified_ns: int, size: int) -> GGUFFile:
    """The file as it is at that moment: its size and the time of its last change are those given."""
    return GGUFFile(path)


def _shown(value: object) -> str:
    if value is None:
        return "missing"
    return f"a list of {len(value)}" if isinstance(value, list | Strings) else repr(value)


_MAX_DEPTH = 4


class _Cursor:
    """Reads one value after the other; `at` is the byte where the next one begins."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def skip(self, length: int) -> int:
        """Move on by `length` bytes and return where they begin. Raises EOFError if the file ends before."""
        start, self.at = self.at, self.at + length
        if self.at > len(self.data):
            raise EOFError(f"byte {self.at} of {len(self.data)} is asked for")
        return start

    def string(self) -> str:
        start = self.skip(self.number("Q"))
        return self.data[start : self.at].decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"metadata of type {kind}")
        element, count = self.number("I"), self.number("Q")
        if element in _SCALARS:
            form = _SCALARS[element]
            start = self.skip(count * struct.calcsize(f"<{form}"))
            return np.frombuffer(self.data, f"<{form}", count, start).tolist()
        if element != _STRING:
            if depth == _MAX_DEPTH:
                raise ValueError(f"lists in lists, more than {_MAX_DEPTH} deep")
            return [self.value(element, depth + 1) for _ in range(count)]
        return self.strings(count)

    def strings(self, count: int) -> Strings:
        """Move on by `count` strings without decoding them; a vocabulary and its merges have hundreds of thousands."""
        read, data, start = struct.Struct("<Q").unpack_from, self.data, self.at
        at = start
        for _ in range(count):
            at += 8 + read(data, at)[0]
        self.skip(at - start)
        return Strings(data, start, count)


def _header(cursor: _Cursor, path: Path) -> tuple[int, int]:
    """How many tensors and metadata fields there are."""
    if cursor.data[:4] != _MAGIC:
        raise CheckpointError(f"{path} is no GGUF file: it begins with {cursor.data[:4]!r}")
    cursor.skip(4)
    version = cursor.number("I")
    if version & 0xFFFF == 0:
        raise CheckpointError(f"{path} is a big-endian GGUF file; convert it with gguf-convert-endian")
    if version not in VERSIONS:
        raise CheckpointError(f"{path} is GGUF version {version}; supported are {VERSIONS}: convert the model again")
    return cursor.number("Q"), cursor.number("Q")


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, TensorInfo]:
    """The tensors by name, their bytes checked to be in the file. They begin at a multiple of `alignment`."""
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment={alignment!r} must be a positive integer")
    sizes = {kind.number: kind for kind in _TYPES.values()}
    found: dict[str, TensorInfo] = {}
    for _ in range(count):
        name, num_dims = cursor.string(), cursor.number("I")
        if not 1 <= num_dims <= _MAX_DIMS or name in found:
            raise ValueError(f"tensor {name} has {num_dims} dimensions or comes twice")
        shape = tuple(cursor.number("Q") for _ in range(num_dims))[::-1]  # the fastest dimension stands first there
        type_id, offset = cursor.number("I"), cursor.number("Q")
        _, values, num_bytes = sizes.get(type_id, StoredType(type_id, 1, 0))
        if shape[-1] % values:
            raise ValueError(f"tensor {name} has rows of {shape[-1]} values, its type blocks of {values}")
        found[name] = TensorInfo(name, shape, type_id, offset, shape[-1] // values * num_bytes)
    start = -(-cursor.at // alignment) * alignment
    placed = {name: replace(info, start=start + info.start) for name, info in found.items()}
    before: TensorInfo | None = None
    for info in sorted(placed.values(), key=lambda info: info.start):
        if info.start + info.num_bytes > len(cursor.data):
            raise EOFError(f"tensor {info.name} ends at byte {info.start + info.num_bytes} of {len(cursor.data)}")
        if info.start % alignment:
            raise ValueError(f"tensor {info.name} begins at {info.start}, no multiple of {alignment}")
        if before is not None and before.start + before.num_bytes > info.start:
            raise ValueError(f"tensors {before.name} and {info.name} overlap")
        before = info
    return placed

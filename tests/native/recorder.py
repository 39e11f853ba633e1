"""Calls of the native library as a file: arguments, all memory that they reach, and what the call left there.

replay.cpp makes the same calls on any machine and compares memory after each, to the bit. A file is a run of records,
every number little-endian:

    BYTES    region u32, offset u64, size u64, then the bytes    what the caller wrote
    REGION   region u32, size u64                                new memory, zeroed
    POINTER  region u32, offset u64, target u32, offset u64      a pointer inside a struct
    FREE     region u32
    LABEL    size u64, text                                      what the following calls are
    CALL     size u64, name; arguments u32; handle u32; for each argument region u32 (0: a number), value u64;
             changes u32, each like BYTES; compared u32, then that many regions
    END

A handle is what a function of OPENING returns; like a region, it has a number."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.native.reach import ARGUMENTS, Range, reach, reach_rows

from aquiline.backends.cpu.native import Library, abi

MAGIC = b"AQTRACE1"
END, REGION, BYTES, POINTER, FREE, LABEL, CALL = range(7)
PASSED = {"select_isa", "set_threads", "isa", "available_isas", "num_threads", "packed_bytes", "last_error"}
PASSED |= {"has_bf16_dot", "fastest_bf16"}
"""Calls that are not recorded: what replay.cpp decides itself, and questions."""

OPENING, CLOSING = {"aq_open_batch", "aq_open_index"}, {"aq_close_batch", "aq_close_index"}
"""Calls between which the library keeps pointers into the memory that the first one reached."""

TIMES = {"aq_keep": 2, "aq_step": 7}
"""Arguments that receive seconds, which differ from run to run."""

LEAST_GAP = 32
"""Bytes between two spans of changes that are written apart."""


@dataclass(eq=False)
class Region:
    """Memory that calls share: `known` is what the replayed memory holds."""

    number: int
    range: Range
    known: NDArray[np.uint8]
    users: set[int] = field(default_factory=set)  # open handles that keep pointers into it

    @property
    def end(self) -> int:
        return self.range.address + self.range.num_bytes

    def holds(self, address: int, num_bytes: int) -> bool:
        return self.range.address <= address and address + num_bytes <= self.end

    def is_at(self, other: Range) -> bool:
        """Whether this is the same memory, used in the same way."""
        own = self.range
        return (own.address, own.num_bytes, own.is_input) == (other.address, other.num_bytes, other.is_input)

    def overlaps(self, other: Range) -> bool:
        return self.range.address < other.address + other.num_bytes and other.address < self.end


def memory(found: Range) -> NDArray[np.uint8]:
    """The bytes as they are now."""
    return np.frombuffer(ctypes.string_at(found.address, found.num_bytes), np.uint8)


class Recorder:
    """Stands in for a Library: does each call and writes it down."""

    def __init__(self, library: Library, path: Path) -> None:
        self._library = library
        self._file = path.open("wb")
        self._file.write(MAGIC + struct.pack("<I", abi()))
        self._regions: list[Region] = []
        self._handles: dict[int, int] = {}
        self._next = 1
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name in PASSED:
            return function
        return lambda *arguments: self._call(f"aq_{name}", function, arguments)

    def label(self, text: str) -> None:
        """Say what the following calls are."""
        self._write("I", LABEL)
        self._text(text)

    def close(self) -> None:
        """End the file."""
        self._write("I", END)
        self._file.close()

    def _write(self, kinds: str, *values: Any) -> None:
        self._file.write(struct.pack(f"<{kinds}", *values))

    def _text(self, text: str) -> None:
        self._write("Q", len(text))
        self._file.write(text.encode())

    def _call(self, name: str, function: Any, given: tuple[Any, ...]) -> Any:
        arguments = [int(a) if isinstance(a, np.integer) else getattr(a, "_obj", a) for a in given]  # behind byref()
        handle = self._handles.get(given[0], 0) if isinstance(given[0], int) else 0
        ranges: list[Range] = []
        for i, value in enumerate(arguments):
            if isinstance(value, ctypes.Array) and value._type_ is ctypes.c_void_p:
                ranges += reach_rows(value, ARGUMENTS[name][i](arguments))
            elif isinstance(value, ctypes.Structure | ctypes.Array | ctypes._SimpleCData):
                ranges += reach(value)
            elif isinstance(value, int) and i in ARGUMENTS[name]:
                ranges.append(Range(value, ARGUMENTS[name][i](arguments)))
        regions = self._place(ranges)
        is_closing = name in CLOSING  # its memory may be gone: it is closed where nothing refers to it any more
        kept = [] if is_closing else [r for r in self._regions if handle in r.users]
        used = list(dict.fromkeys(regions + kept))
        self._tell(used, ranges)

        result = function(*given)

        if name in OPENING:
            assert result, self._library.last_error()
            handle = self._handles[result] = self._next
            self._next += 1
            for region in used:
                region.users.add(handle)
        self._note(name, arguments, used, handle)
        if is_closing:
            del self._handles[given[0]]
            for region in self._regions:
                region.users.discard(handle)
        return result

    def _place(self, ranges: list[Range]) -> list[Region]:
        """The regions of a call's ranges. Memory that overlaps otherwise than before has been freed since."""
        regions = []
        for found in sorted((r for r in ranges if r.num_bytes > 0), key=lambda r: (r.address, -r.num_bytes)):
            region = next((r for r in self._regions if r.holds(found.address, found.num_bytes)), None)
            if region is None or not (region.users or region in regions or region.is_at(found)):
                for old in [r for r in self._regions if r.overlaps(found)]:
                    assert not old.users and old not in regions, f"{found} overlaps {old.range}"
                    self._regions.remove(old)
                    self._write("II", FREE, old.number)
                region = Region(self._next, found, np.zeros(found.num_bytes, np.uint8))
                self._next += 1
                self._regions.append(region)
                self._write("IIQ", REGION, region.number, found.num_bytes)
            regions.append(region)
        return regions

    def _find(self, address: int) -> Region | None:
        return next((r for r in self._regions if r.holds(address, 1)), None)

    def _tell(self, regions: list[Region], ranges: list[Range]) -> None:
        """Write down what the caller changed since the last call, and where the structs' pointers lead."""
        for region in regions:
            for offset, content in self._changes(region):
                self._write("IIQQ", BYTES, region.number, offset, len(content))
                self._file.write(content)
            region.known = memory(region.range)
        for found in ranges:
            for at, target in found.pointers:
                region, to = self._find(found.address), self._find(target)
                if region is None or to is None:
                    continue  # behind the pointer lie zero bytes
                offset = found.address - region.range.address + at
                self._write("IIQIQ", POINTER, region.number, offset, to.number, target - to.range.address)

    @staticmethod
    def _changes(region: Region) -> list[tuple[int, bytes]]:
        """The spans in which memory differs from what is known of it."""
        now = memory(region.range)
        differ = np.flatnonzero(now != region.known)
        if not differ.size:
            return []
        gaps = np.flatnonzero(np.diff(differ) > LEAST_GAP)
        firsts, ends = differ[np.r_[0, gaps + 1]], differ[np.r_[gaps, -1]] + 1
        return [(first, now[first:end].tobytes()) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True)]

    def _note(self, name: str, arguments: list[Any], used: list[Region], handle: int) -> None:
        """Write down a call that was made, and what it left in memory."""
        self.num_calls += 1
        self._write("I", CALL)
        self._text(name)
        self._write("II", len(arguments), handle if name in OPENING else 0)
        for i, (value, kind) in enumerate(zip(arguments, self._kinds(name), strict=True)):
            if isinstance(value, int) and i in ARGUMENTS[name] and not ARGUMENTS[name][i](arguments):
                self._write("IQ", used[0].number, 0)  # the address of no bytes: any will do
            else:
                self._argument(name, i, value, kind)
        timed = [r for r in used if self._is_time(name, arguments, r)]
        untimed = [r for r in used if not r.range.is_input and r not in timed]
        changed = [(r, offset, content) for r in untimed for offset, content in self._changes(r)]
        self._write("I", len(changed))
        for region, offset, content in changed:
            self._write("IQQ", region.number, offset, len(content))
            self._file.write(content)
            region.known = memory(region.range)
        self._write(f"I{len(untimed)}I", len(untimed), *(r.number for r in untimed))
        for region in timed:  # what it holds from here on differs: nothing else may come to lie in it
            self._regions.remove(region)
            self._write("II", FREE, region.number)

    def _argument(self, name: str, i: int, value: Any, kind: Any) -> None:
        if value is None:
            self._write("IQ", 0, 0)
        elif isinstance(value, int) and value in self._handles and i == 0:
            self._write("IQ", self._handles[value], 0)
        elif kind is ctypes.c_float:
            self._write("IfI", 0, value, 0)
        elif kind is ctypes.c_double:
            self._write("Id", 0, value)
        elif isinstance(value, int) and i not in ARGUMENTS[name]:
            self._write("IQ", 0, value & 0xFFFFFFFFFFFFFFFF)
        else:
            address = value if isinstance(value, int) else ctypes.addressof(value)
            region = self._find(address)
            assert region is not None, f"{name}: argument {i} reaches nothing"
            self._write("IQ", region.number, address - region.range.address)

    def _kinds(self, name: str) -> list[Any]:
        return list(getattr(self._library, name.removeprefix("aq_")).argtypes)

    @staticmethod
    def _is_time(name: str, arguments: list[Any], region: Region) -> bool:
        return name in TIMES and region.range.address == ctypes.addressof(arguments[TIMES[name]])

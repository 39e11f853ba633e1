"""Documents out of files and folders: text, JSONL (gzipped too), JSON lists, .bin, and tables.

Tables are parquet and arrow files, saved folders and data sets of the hub. The Hugging Face `datasets` library reads
them; it comes with the extra `train` and is loaded where it is needed. This module owns which paths can be read, the
faults of files, and which documents are held out; documents.py owns what a row may hold. A document is held out if the
sha256 of its key (its path, and its index in a file of many) is 0 mod 20. So the split is the same everywhere, and no
result influences it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.checks import parse_json
from aquiline.train.documents import Corpus, Document, Rejects, RowError, RowReader, build_corpus

TABLE_SUFFIXES = (".parquet", ".arrow")
TEXT_SUFFIXES = (".py", ".txt", ".md")
FOLDER_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".bin", *TABLE_SUFFIXES)
"""Files of a folder that are read. A .json file is read only if it is named itself, since folders hold other ones."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HELD_OUT_MODULUS = 20
DEFAULT_SPLIT = "train"


@dataclass(frozen=True)
class Split:
    """Documents to train on, documents to judge by, and what was rejected."""

    train: Corpus
    held_out: Corpus
    rejects: Rejects


def load_split(data: Iterable[Path], held_out: Iterable[Path], rows: RowReader) -> Split:
    """Read everything. Without held-out paths one document in twenty of the data is held out. Raises ValueError if
    either side has no document."""
    rejects, held_paths = Rejects(), tuple(held_out)
    sides: dict[bool, list[Document]] = {False: [], True: []}
    for document in read_documents(data, rows, rejects):
        sides[not held_paths and is_held_out(document.key)].append(document)
    sides[True] += read_documents(held_paths, rows, rejects)
    for side, name in ((False, "training"), (True, "held-out")):
        if not sides[side]:
            hint = "" if held_paths or not side else " (one in 20 is held out by its name: give --held-out PATH)"
            raise ValueError(f"no {name} document left{hint}. Rejected: {rejects or 'none'}")
    return Split(build_corpus(sides[False]), build_corpus(sides[True]), rejects)


def is_held_out(key: str) -> bool:
    """One document in twenty, by the hash of its key."""
    return int(hashlib.sha256(key.encode()).hexdigest(), 16) % HELD_OUT_MODULUS == 0


def check_paths(paths: Iterable[Path]) -> None:
    """Raise ValueError as `read_documents` would for a path that does not exist, has a wrong suffix or needs a library
    that is not installed. Reads nothing, so that a command can ask before it loads a model."""
    for path in paths:
        for table in (file for file, _ in _files_of(path) if _is_table(file)):
            _check_installed(table)


def read_documents(paths: Iterable[Path], rows: RowReader, rejects: Rejects) -> Iterator[Document]:
    """Every usable document under the paths: files, folders, saved data sets and ids of the Hugging Face hub. The last
    two take :SPLIT after the name if they have several splits.

    Raises ValueError for a path that does not exist, has a wrong suffix or cannot be read at all."""
    source = _Source(rows, rejects)
    for path in paths:
        for file, key in _files_of(path):
            yield from source.documents(file, key)


@dataclass(frozen=True)
class _Source:
    """Reads documents for one target, and counts the rows and files that cannot be used."""

    rows: RowReader
    rejects: Rejects

    def documents(self, file: Path, key: str) -> Iterator[Document]:
        vocab_size = self.rows.vocab_size
        for document in self._read(file, key):
            tokens = document.tokens
            if len(tokens) < 3:
                self.rejects.add("fewer than 3 tokens", document.key)
            elif tokens.min() < 0 or tokens.max() >= vocab_size:
                self.rejects.add(f"token id outside [0, {vocab_size})", document.key)
            elif document.mask is not None and not document.mask[2:].any():
                self.rejects.add("no token counted by its loss mask", document.key)
            else:
                yield document

    def _read(self, file: Path, key: str) -> Iterable[Document]:
        if _is_table(file):
            return self._of_rows(_table_rows(file), key)
        by_suffix = {".bin": self._bin, ".jsonl": self._jsonl, ".gz": self._jsonl, ".json": self._json}
        return by_suffix.get(file.suffix, self._text)(file, key)

    def _of_rows(self, rows: Iterable[object], key: str) -> Iterator[Document]:
        """Documents of rows. A row of bytes is a line of JSON, or an empty line."""
        for index, row in enumerate(rows):
            if isinstance(row, bytes) and not row.strip():
                continue
            place = f"{key}:{index}"
            try:
                parsed = parse_json(row) if isinstance(row, bytes) else row
            except ValueError:
                self.rejects.add("not JSON", place)
                continue
            try:
                yield from self.rows.documents(parsed, place)
            except RowError as error:
                reason, *detail = error.args
                self.rejects.add(reason, ": ".join([place, *detail]))

    def _text(self, path: Path, key: str) -> Iterator[Document]:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.rejects.add(f"unreadable ({type(error).__name__})", key)
            return
        yield Document(key, np.array(self.rows.encode(text), dtype=np.int32))

    def _bin(self, path: Path, key: str) -> Iterator[Document]:
        rows = self.rows
        if rows.boundary is None:
            told = "documents split at the target's bos or eos id, and it names neither; use JSONL"
            raise ValueError(f"{path}: .bin {told}")
        if rows.vocab_size > 1 << 16:
            told = f"holds uint16 and the target has {rows.vocab_size} tokens; use JSONL input_ids"
            raise ValueError(f"{path}: .bin {told}")
        stream = np.fromfile(path, dtype=np.uint16)
        starts = np.unique(np.concatenate(([0], np.flatnonzero(stream == rows.boundary))))
        for index, tokens in enumerate(np.split(stream, starts[1:])):
            yield Document(f"{key}:{index}", tokens)

    def _jsonl(self, path: Path, key: str) -> Iterator[Document]:
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
                yield from self._of_rows(lines, key)
        except (OSError, EOFError, zlib.error) as error:
            self.rejects.add(f"unreadable from some line on ({type(error).__name__})", key)

    def _json(self, path: Path, key: str) -> Iterator[Document]:
        try:
            rows = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); one object a line is .jsonl") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path}: must be a JSON list of rows")
        yield from self._of_rows(rows, key)


def _files_of(path: Path) -> list[tuple[Path, str]]:
    """The files that a path names, each with the key of its documents. A saved data set and an id of the hub are listed
    as they are. Raises ValueError for a path that cannot be read."""
    if path.is_dir() and not _is_saved(path):
        files = sorted(p for p in path.rglob("*") if p.name.endswith(FOLDER_SUFFIXES) and p.is_file())
        if not files:
            raise ValueError(f"{path} holds no {' '.join(FOLDER_SUFFIXES)} file")
        return [(file, file.relative_to(path).as_posix()) for file in files]
    name, _ = _name_and_split(path)
    has_suffix = name.endswith((*FOLDER_SUFFIXES, ".json"))
    if path.is_file():
        if not has_suffix:
            raise ValueError(f"{path}: suffix must be one of {' '.join(FOLDER_SUFFIXES)} .json")
    elif not _is_saved(Path(name)) and (has_suffix or _HUB_ID.fullmatch(name) is None):
        raise ValueError(f"data path {path} does not exist")
    return [(path, path.name)]


def _is_table(path: Path) -> bool:
    """Whether the `datasets` library reads a path that `_files_of` gave: a table, or a data set that is no file."""
    return path.suffix in TABLE_SUFFIXES or not path.is_file()


def _name_and_split(path: Path) -> tuple[str, str | None]:
    """The name of a data set and the split that a path NAME:SPLIT asks for, None if it asks for none."""
    name, _, split = str(path).rpartition(":")
    return (name, split) if not path.exists() and ":" in path.name else (str(path), None)


def _is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of the `datasets` library wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def _check_installed(path: Path) -> None:
    """Raise ValueError naming the extra if the library that reads `path` is not installed. Does not load it."""
    if find_spec("datasets") is None:
        raise ValueError(f"data {path}: needs the datasets library; install it with: pip install 'aquiline[train]'")


def _table_rows(path: Path) -> Iterator[Any]:
    """Rows of a parquet or arrow file, of a folder that `save_to_disk` wrote, or of a data set of the hub, which is
    downloaded once into the library's cache. Raises ValueError if it cannot be read, or has no such split."""
    _check_installed(path)
    from datasets import load_dataset, load_from_disk

    form = path.suffix.removeprefix(".")
    name, split = _name_and_split(path)
    try:
        if path.is_file():
            yield from load_dataset(form, data_files=name, split="train", streaming=True, trust_remote_code=False)
            return
        is_saved = Path(name).is_dir()
        found = load_from_disk(name) if is_saved else load_dataset(name, trust_remote_code=False)
    except Exception as error:  # of many kinds: pyarrow's, the library's, the network's, the hub's
        why = " ".join(str(error).split()) or type(error).__name__
        if path.is_file():
            raise ValueError(f"{path}: not readable as {form} ({why}); write it again") from None
        if is_saved:
            raise ValueError(f"{name}: not readable as a saved data set ({why}); save it again") from None
        raise ValueError(
            f"data {name}: neither a file or folder here nor a data set that the Hugging Face hub gave: {why}"
        ) from None
    yield from _split_of(found, name, split)


def _split_of(found: Any, name: str, split: str | None) -> Any:
    """One split of a data set that may have several: the one asked for, else "train", else the only one."""
    if not isinstance(found, dict):
        if split is not None:
            raise ValueError(f"data {name}:{split}: {name} has no splits; drop :{split}")
        return found
    names = list(found)
    chosen = split or (DEFAULT_SPLIT if DEFAULT_SPLIT in names or len(names) != 1 else names[0])
    if chosen not in names:
        raise ValueError(f"data {name}: has the splits {', '.join(names)}; name one, as {name}:{names[0]}")
    return found[chosen]

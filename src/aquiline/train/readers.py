"""Documents out of files and folders: text, JSONL (gzipped too), JSON lists, .bin, and what table_files.py reads.

Owns which paths can be read, the faults of files, and which documents are held out; rows.py owns what a row may hold. A
document is held out if the sha256 of its key (its path, and its index in a file of many) is 0 mod 20. So the split is
the same everywhere, and no result influences it.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.checks import parse_json
from aquiline.train import table_files
from aquiline.train.documents import Corpus, Document, Rejects, TokenIds, build_corpus
from aquiline.train.rows import RowError, RowReader

TEXT_SUFFIXES = (".py", ".txt", ".md")
FOLDER_SUFFIXES = (*TEXT_SUFFIXES, ".jsonl", ".jsonl.gz", ".bin", *table_files.SUFFIXES)
"""Files of a folder that are read. A .json file is read only if it is named itself, since folders hold other ones."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

HELD_OUT_MODULUS = 20


@dataclass(frozen=True)
class Split:
    """Documents to train on, documents to judge by, and what was rejected."""

    train: Corpus
    held_out: Corpus
    rejects: Rejects


def load_split(data: Iterable[Path], held_out: Iterable[Path], ids: TokenIds, loss_on: str = "answers") -> Split:
    """Read everything. Without held-out paths one document in twenty of the data is held out.

    loss_on: "answers" counts the tokens that the model wrote, by loss masks and chat templates; "all" counts every
    token. Raises ValueError if either side has no document."""
    rejects, held_paths = Rejects(), tuple(held_out)
    sides: dict[bool, list[Document]] = {False: [], True: []}
    for document in read_documents(data, ids, rejects, loss_on):
        sides[not held_paths and is_held_out(document.key)].append(document)
    sides[True] += read_documents(held_paths, ids, rejects, loss_on)
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
        if _is_folder(path):
            tabular = next((file for file in _files_in(path) if file.suffix in table_files.SUFFIXES), None)
        else:
            tabular = path if _is_table(path) else None
        if tabular is not None:
            table_files.check_installed(tabular)


def read_documents(
    paths: Iterable[Path], ids: TokenIds, rejects: Rejects, loss_on: str = "answers"
) -> Iterator[Document]:
    """Every usable document under the paths: files, folders, saved data sets and ids of the Hugging Face hub. The last
    two take :SPLIT behind the name if they have several splits.

    Raises ValueError for a path that does not exist, has a wrong suffix or cannot be read at all."""
    source = _Source(RowReader(ids, loss_on), rejects)
    for path in paths:
        yield from source.under(path)


@dataclass(frozen=True)
class _Source:
    """Reads documents for one target, and counts the rows and files that cannot be used."""

    rows: RowReader
    rejects: Rejects

    def under(self, path: Path) -> Iterator[Document]:
        if _is_folder(path):
            for file in _files_in(path):
                yield from self._file(file, file.relative_to(path).as_posix())
        elif _is_table(path) and not path.is_file():
            yield from self._table(path)
        else:
            yield from self._file(path, path.name)

    def _table(self, path: Path) -> Iterator[Document]:
        name, split = _name_and_split(path)
        is_saved = Path(name).is_dir()
        rows = table_files.saved_rows(Path(name), split) if is_saved else table_files.hub_rows(name, split)
        key = Path(name).name if split is None else f"{Path(name).name}:{split}"
        yield from self._checked(self._of_rows(rows, key))

    def _file(self, path: Path, key: str) -> Iterator[Document]:
        by_suffix = {".bin": self._bin, ".jsonl": self._jsonl, ".gz": self._jsonl, ".json": self._json}
        if path.suffix in table_files.SUFFIXES:
            yield from self._checked(self._of_rows(table_files.file_rows(path), key))
            return
        yield from self._checked(by_suffix.get(path.suffix, self._text)(path, key))

    def _checked(self, documents: Iterable[Document]) -> Iterator[Document]:
        vocab_size = self.rows.ids.vocab_size
        for document in documents:
            tokens = document.tokens
            if len(tokens) < 3:
                self.rejects.add("fewer than 3 tokens", document.key)
            elif tokens.min() < 0 or tokens.max() >= vocab_size:
                self.rejects.add(f"token id outside [0, {vocab_size})", document.key)
            elif document.mask is not None and not document.mask[2:].any():
                self.rejects.add("no token counted by its loss mask", document.key)
            else:
                yield document

    def _of_rows(self, rows: Iterable[object], key: str) -> Iterator[Document]:
        for index, row in enumerate(rows):
            yield from self._of_row(row, f"{key}:{index}")

    def _of_row(self, row: object, key: str) -> list[Document]:
        try:
            return self.rows.documents(row, key)
        except RowError as error:
            reason, *detail = error.args
            self.rejects.add(reason, ": ".join([key, *detail]))
            return []

    def _text(self, path: Path, key: str) -> Iterator[Document]:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self.rejects.add(f"unreadable ({type(error).__name__})", key)
            return
        yield Document(key, np.array(self.rows.ids.encode(text), dtype=np.int32))

    def _bin(self, path: Path, key: str) -> Iterator[Document]:
        ids = self.rows.ids
        if ids.boundary is None:
            raise ValueError(
                f"{path}: .bin documents split at the target's bos or eos id, and it names neither; use JSONL"
            )
        if ids.vocab_size > 1 << 16:
            raise ValueError(
                f"{path}: .bin holds uint16 and the target has {ids.vocab_size} tokens; use JSONL input_ids"
            )
        stream = np.fromfile(path, dtype=np.uint16)
        starts = np.unique(np.concatenate(([0], np.flatnonzero(stream == ids.boundary))))
        for index, tokens in enumerate(np.split(stream, starts[1:])):
            yield Document(f"{key}:{index}", tokens)

    def _jsonl(self, path: Path, key: str) -> Iterator[Document]:
        try:
            with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
                for index, line in enumerate(lines):
                    if line.strip():
                        yield from self._line(line, f"{key}:{index}")
        except (OSError, EOFError, zlib.error) as error:
            self.rejects.add(f"unreadable from some line on ({type(error).__name__})", key)

    def _line(self, line: bytes, key: str) -> list[Document]:
        try:
            row = parse_json(line)
        except ValueError:
            self.rejects.add("not JSON", key)
            return []
        return self._of_row(row, key)

    def _json(self, path: Path, key: str) -> Iterator[Document]:
        try:
            rows = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: not JSON ({error}); one object a line is .jsonl") from None
        if not isinstance(rows, list):
            raise ValueError(f"{path}: must be a JSON list of rows")
        yield from self._of_rows(rows, key)


def _is_folder(path: Path) -> bool:
    """Whether a path is a folder of files, not a saved data set."""
    return path.is_dir() and not table_files.is_saved(path)


def _files_in(folder: Path) -> list[Path]:
    """The files of a folder that are read. Raises ValueError if there are none."""
    files = sorted(p for p in folder.rglob("*") if p.name.endswith(FOLDER_SUFFIXES) and p.is_file())
    if not files:
        raise ValueError(f"{folder} holds no {' '.join(FOLDER_SUFFIXES)} file")
    return files


def _is_table(path: Path) -> bool:
    """Whether table_files.py reads a path that is no folder of files. Raises ValueError if nothing reads it."""
    if path.is_file():
        if not path.name.endswith((*FOLDER_SUFFIXES, ".json")):
            raise ValueError(f"{path}: suffix must be one of {' '.join(FOLDER_SUFFIXES)} .json")
        return path.suffix in table_files.SUFFIXES
    name, _ = _name_and_split(path)
    is_hub_id = _HUB_ID.fullmatch(name) is not None and not name.endswith((*FOLDER_SUFFIXES, ".json"))
    if not is_hub_id and not (Path(name).is_dir() and table_files.is_saved(Path(name))):
        raise ValueError(f"data path {path} does not exist")
    return True


def _name_and_split(path: Path) -> tuple[str, str | None]:
    """The name of a data set and the split that stands behind it as :SPLIT."""
    name, _, split = str(path).rpartition(":")
    return (name, split) if not path.exists() and ":" in path.name else (str(path), None)

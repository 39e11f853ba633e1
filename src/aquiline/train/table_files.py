"""Rows through the Hugging Face `datasets` library: parquet and arrow files, saved folders, the hub.

The library comes with the extra `train` and is loaded where it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".arrow")
DEFAULT_SPLIT = "train"


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))


def file_rows(file: Path) -> Iterator[Any]:
    """Rows of a parquet or arrow file. Raises ValueError if it cannot be read."""
    form = file.suffix.removeprefix(".")
    library = _library(file)
    try:
        yield from library.load_dataset(
            form, data_files=str(file), split="train", streaming=True, trust_remote_code=False
        )
    except Exception as error:  # pyarrow's and the library's own, of many kinds
        raise ValueError(f"{file}: not readable as {form} ({_line(error)}); write it again") from None


def saved_rows(folder: Path, split: str | None) -> Iterator[Any]:
    """Rows of a folder that `save_to_disk` wrote. Raises ValueError if it cannot be read, or has no such split."""
    library = _library(folder)
    try:
        found = library.load_from_disk(str(folder))
    except Exception as error:  # as above
        raise ValueError(f"{folder}: not readable as a saved data set ({_line(error)}); save it again") from None
    yield from _split_of(found, str(folder), split)


def hub_rows(name: str, split: str | None) -> Iterator[Any]:
    """Rows of a data set of the hub, downloaded once into the library's cache. Raises ValueError if the hub does not
    give it, or it has no such split."""
    library = _library(name)
    try:
        found = library.load_dataset(name, trust_remote_code=False)
    except Exception as error:  # the network's, the hub's and the library's
        raise ValueError(
            f"data {name}: neither a file or folder here nor a data set that the Hugging Face hub gave: {_line(error)}"
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


def check_installed(what: Path | str) -> None:
    """Raise ValueError naming the extra if the library that reads `what` is not installed. Does not load it."""
    if find_spec("datasets") is None:
        raise ValueError(f"data {what}: needs the datasets library; install it with: pip install 'aquiline[train]'")


def _library(what: Path | str) -> Any:
    check_installed(what)
    import datasets

    return datasets


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

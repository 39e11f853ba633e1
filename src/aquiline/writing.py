"""Files that commands write: whole or not at all, and named in errors. Python's error of a full disk names no file."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write, not of a path: those of a path name it."""


def check_place(path: Path | None, is_folder: bool = False) -> None:
    """Refuse a place where no file, or no folder of files, can be written, before work is done for it. Raises OSError
    naming it."""
    if path is None:
        return
    if path.exists() and path.is_dir() != is_folder:
        raise OSError(f"{path}: is a {'file' if is_folder else 'folder'}; name a {'folder' if is_folder else 'file'}")
    folder = path if is_folder else path.parent
    while is_folder and not folder.exists():  # these are made
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise OSError(f"{path}: {folder} is no folder that can be written; make it, or name another place")


def check_new(path: Path, force: bool) -> None:
    """Refuse a place where something is already, unless it may be replaced, or where nothing can be written. Raises
    OSError naming it."""
    if path.exists() and not force:
        raise OSError(f"{path}: exists and is left alone; pass --force to replace it, or name another place")
    check_place(path, is_folder=path.is_dir())


@contextmanager
def placing(path: Path, is_folder: bool = False) -> Iterator[Path]:
    """A temporary file or folder beside `path`, which takes its name when the block ends without an error, and is
    removed otherwise. Into a folder that exists its files are moved, one rename each. Raises OSError."""
    part = path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")
    try:
        with writing(path, "What was there is unchanged"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if is_folder:
                part.mkdir()
            yield part
        if not path.is_dir():
            part.replace(path)
            return
        for file in sorted(part.iterdir(), reverse=True):  # weights before the config that describes them
            file.replace(path / file.name)
    finally:
        if part.is_dir():
            shutil.rmtree(part)
        else:
            part.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, kept: str) -> Iterator[None]:
    """Within it `path` is opened, written and closed: an error of the disk is raised anew with the path and `kept`, a
    sentence on what there is of the output. Raises OSError."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno not in NO_ROOM:
            raise
        raise OSError(f"{path}: cannot be written: {error.strerror}. {kept}") from error


def resume_lines(path: Path, take: Callable[[int, bytes], None]) -> int:
    """Read the output of an earlier run, to go on after it: hand each line, with its number from 0, to `take`, and drop
    a last line that was cut. Returns how many lines there are."""
    num_lines = num_bytes = 0
    with path.open("rb") as lines:
        for line in lines:
            if not line.endswith(b"\n"):
                break
            take(num_lines, line)
            num_lines, num_bytes = num_lines + 1, num_bytes + len(line)
    if num_bytes < path.stat().st_size:
        os.truncate(path, num_bytes)  # not rewritten: a kill at this moment must not lose whole lines
    return num_lines


def write_whole(path: Path, text: str, kept: str) -> None:
    """Write a text file, whole or not at all; `kept` as in `writing`. Raises OSError."""
    part = path.with_name(f"{path.name}.part")
    try:
        with writing(path, kept):
            part.write_text(text, encoding="utf-8")
    except OSError:
        part.unlink(missing_ok=True)
        raise
    part.replace(path)

"""A cache on disk of the target's views of documents: computed once, read in every later epoch.

A cache is a folder of shards, one safetensors file each, which may be copied or deleted. A document is found by the
hash of its token ids, so a run with more data still finds the documents of an earlier run. Views are rounded to
bfloat16 before they are first used, so that a loss from the cache equals the loss of freshly computed views.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from aquiline.train.teacher import View
from aquiline.types import Int32

logger = logging.getLogger(__name__)

SHARD_TOKENS = 16384
"""A shard is written once this many positions wait; a killed run loses the views that waited."""


def bytes_per_token(width: int, hidden_size: int) -> int:
    """Bytes on disk of one position: features of `width` numbers and last hidden state in bfloat16, log-sum-exp and
    best token."""
    return 2 * (width + hidden_size) + 8


def document_key(tokens: Int32) -> str:
    """The name of a document in a cache: 128 bits of the hash of its token ids."""
    return hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()[:32]


class FeatureCache:
    """Views of documents in `directory`, all of one target with one set of captured layers.

    `identity` names that target. Raises ValueError if the folder holds views of another target."""

    def __init__(self, directory: Path, identity: dict[str, str]) -> None:
        self.directory, self.identity = directory, identity
        self._places: dict[str, tuple[Any, slice]] = {}  # a shard and positions of it
        self._waiting: dict[str, View] = {}
        directory.mkdir(parents=True, exist_ok=True)
        for file in sorted(directory.glob("*.safetensors")):
            self._open(file)

    def __contains__(self, key: str) -> bool:
        return key in self._places or key in self._waiting

    @property
    def num_documents(self) -> int:
        """Documents whose views are there."""
        return len(self._places) + len(self._waiting)

    def get(self, key: str) -> View:
        """A document's view. Raises KeyError if it is not there."""
        if key in self._waiting:
            return self._waiting[key]
        shard, place = self._places[key]
        return View(*(shard.get_slice(name)[place] for name in View._fields))

    def add(self, key: str, view: View) -> None:
        """Keep a view; it reaches the disk with the next full shard or `flush`."""
        self._waiting[key] = view
        if sum(len(view.lse) for view in self._waiting.values()) >= SHARD_TOKENS:
            self.flush()

    def flush(self) -> None:
        """Write the waiting views as one shard. Raises OSError if the disk is full; earlier shards stay whole."""
        if not self._waiting:
            return
        columns = zip(*self._waiting.values(), strict=True)
        tensors = {name: torch.cat(list(column)) for name, column in zip(View._fields, columns, strict=True)}
        documents = {key: len(view.lse) for key, view in self._waiting.items()}
        metadata = {"identity": json.dumps(self.identity), "documents": json.dumps(documents)}
        name = hashlib.sha256(metadata["documents"].encode()).hexdigest()[:32]  # ranks share some documents, not all
        file = self.directory / f"{name}.safetensors"
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        try:
            save_file(tensors, temporary, metadata=metadata)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise OSError(
                f"{temporary}: features cannot be written ({error}); free disk space or drop --features"
            ) from None
        temporary.replace(file)
        self._waiting.clear()
        self._open(file)

    def _open(self, file: Path) -> None:
        try:
            shard = safe_open(file, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            logger.warning("%s is not read (%s): its documents are computed again", file, error)
            return
        metadata = shard.metadata() or {}  # type: ignore[no-untyped-call]
        if not {"identity", "documents"} <= metadata.keys():
            logger.warning("%s is not read (it holds no features): it is left alone", file)
            return
        found = json.loads(metadata["identity"])
        if found != self.identity:
            names = [name for name in self.identity if found.get(name) != self.identity[name]]
            told = ", ".join(f"{name}: {found.get(name)} there, {self.identity[name]} here" for name in names)
            raise ValueError(f"features={self.directory}: made with another target ({told}); name another folder")
        start = 0
        for key, length in json.loads(metadata["documents"]).items():
            self._places[key] = (shard, slice(start, start + length))
            start += length


class Views:
    """The target's views of documents: from the cache if it has them, else computed by `score` and added to it. The
    end of a run must `close` them, so that every view reaches the disk."""

    def __init__(self, score: Callable[[Sequence[Int32]], list[View]], cache: FeatureCache | None) -> None:
        self.score, self.cache = score, cache
        self.num_computed = 0

    def of(self, documents: Sequence[Int32]) -> list[View]:
        """Views of documents, in their order."""
        keys = [document_key(tokens) for tokens in documents]
        found = {key: self.cache.get(key) for key in keys if key in self.cache} if self.cache is not None else {}
        missing = {key: tokens for key, tokens in zip(keys, documents, strict=True) if key not in found}
        if missing:
            self.num_computed += sum(map(len, missing.values()))
            for key, view in zip(missing, self.score(list(missing.values())), strict=True):
                found[key] = view
                if self.cache is not None:
                    self.cache.add(key, view)
        return [found[key] for key in keys]

    def close(self) -> None:
        """Write the views that the cache has not written yet. If the disk is full they are lost with a warning, since
        the run that computed them is over."""
        try:
            if self.cache is not None:
                self.cache.flush()
        except OSError as error:
            logger.warning("%s", error)

"""The frozen target's side of training: what it computes at every position of a document.

`Teacher` runs the target over whole documents, in bfloat16. On a CPU it uses the native library, so that features are
the vectors that serving in bfloat16 computes (integer products of packed blocks differ by their rounding); on a GPU, or
without a library, it uses the torch decoder. The result for a document is a `View`, small enough to be kept on disk:
features and the normed last hidden state in bfloat16, and the log-sum-exp of the whole vocabulary's logits, from which
any part of the target's distribution can be computed.

The torch decoder is held in either case. Of a mixture with experts in MXFP4 it holds float32, eight times their size;
the native library runs them packed. Targets with attention sinks run in the native library alone.

`FeatureCache` keeps views on disk: a folder of shards, one safetensors file each, which may be copied or deleted. A
document is found by the hash of its token ids, so a run with more data still finds the documents of an earlier run.
Views are rounded to bfloat16 before they are first used, so a loss from the cache equals that of fresh views.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import log_softmax

from aquiline.backends.base import HEAD_ROWS
from aquiline.backends.choose import runs_natively
from aquiline.backends.torch import reference as ops
from aquiline.backends.torch.decoder import Decoder
from aquiline.config import Environment
from aquiline.engine.model import LoadedModels, Loading, from_weights
from aquiline.engine.score import MAX_DOCUMENTS, Scorer
from aquiline.models.load import read_model_config, read_target, resolve
from aquiline.text.tokenizer import load_tokenizer
from aquiline.train.pass_attention import PackedAttention
from aquiline.types import Int32

logger = logging.getLogger(__name__)

SHARD_TOKENS = 16384
"""A shard is written once this many positions wait; a killed run loses the views that waited."""


def has_bfloat16(device: str) -> bool:
    """Whether bfloat16 products are fast on this device. A CPU without the instructions runs them at 1 % of the
    speed."""
    if device.startswith("cuda"):
        return bool(torch.cuda.is_bf16_supported())
    return bool(torch.cpu._is_avx512_bf16_supported())


def autocast(device: str) -> contextlib.AbstractContextManager[object]:
    """bfloat16 autocast where the hardware has it, else nothing."""
    if not has_bfloat16(device):
        return contextlib.nullcontext()
    return torch.autocast(device.partition(":")[0], torch.bfloat16)


class View(NamedTuple):
    """What the target computes at each of n positions of one document.

    features bfloat16 [n, C * H]: the captured layers' outputs; hidden bfloat16 [n, H]: the last layer's output after
    the final norm; lse float32 [n]: log-sum-exp of the logits hidden @ head, within some thousandths where float32
    arithmetic multiplied the hidden state before it was rounded; best int32 [n]: their argmax, ties to that error."""

    features: Tensor
    hidden: Tensor
    lse: Tensor
    best: Tensor


class Teacher:
    """The frozen target. head [V, H] float32: its output matrix; max_tokens: the most tokens of one forward."""

    def __init__(self, path: Path, capture: tuple[int, ...], device: str, max_tokens: int) -> None:
        self.device, self.max_tokens, self.capture = device, max_tokens, capture
        place, environment = resolve(path), Environment.read()
        geometry = read_model_config(place)
        if geometry.sinks and not runs_natively(device, environment):
            raise ValueError(
                f"device={device!r}: training reads a target with attention sinks ({geometry.family}) through the "
                "native library alone; use device='cpu', where the library runs"
            )
        weights = read_target(place, dtype="bfloat16", capture=capture)
        self.decoder = Decoder.of(weights)
        self.config = self.decoder.config
        self.head = self.decoder.head.detach().float().to(device)
        self.models: LoadedModels | None = None
        self._scorer: Scorer | None = None
        if device == "cpu":
            self.models = from_weights(weights, None, load_tokenizer(path), Loading("bfloat16"), environment)
        if self.models is not None and self.models.pair.is_exact:
            self._scorer = Scorer(self.models, max_tokens)
        else:
            self.decoder = self.decoder.float() if device == "cpu" else self.decoder.to(device)

    @property
    def path(self) -> str:
        """What runs: "native" or "torch"."""
        return "torch" if self._scorer is None else "native"

    def views(self, documents: Sequence[Int32]) -> list[View]:
        """Views of documents of at most `max_tokens` tokens each; a forward takes as many documents as fit."""
        views: list[View] = []
        group: list[Int32] = []
        for tokens in documents:
            if len(group) == MAX_DOCUMENTS or (group and sum(map(len, group)) + len(tokens) > self.max_tokens):
                views += self._score(group)
                group = []
            group.append(tokens)
        return views + (self._score(group) if group else [])

    @torch.no_grad()
    def _score(self, documents: list[Int32]) -> list[View]:
        hidden, features, best, best_logprob = self._forward(documents)
        normed = ops.rms_norm(hidden.float(), self.decoder.final_norm.float(), self.config.rms_norm_eps).bfloat16()
        lse = (normed.float() * self.head[best]).sum(-1) - best_logprob
        whole = View(features.bfloat16(), normed, lse, best.int())
        lengths = [len(tokens) for tokens in documents]
        return list(map(View, *(torch.split(values.cpu(), lengths) for values in whole)))

    def _forward(self, documents: list[Int32]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of all documents' positions: the residual stream [n, H], the features [n, C * H], the most probable next
        token [n] and its log-probability [n]."""
        if self._scorer is not None:
            hidden, features, best, best_logprob = map(torch.from_numpy, self._scorer(documents))
            return hidden, features, best.long(), best_logprob
        lengths = torch.tensor([len(tokens) for tokens in documents])
        document = torch.repeat_interleave(torch.arange(len(documents)), lengths)[None].to(self.device)
        positions = torch.cat([torch.arange(int(n)) for n in lengths])[None].to(self.device)
        tokens = torch.from_numpy(np.concatenate(documents)).long()[None].to(self.device)
        out = self.decoder(tokens, positions, PackedAttention(self.config, document))
        tops = [log_softmax(self.decoder.logits(rows), -1).max(-1) for rows in out.hidden[0].split(HEAD_ROWS)]
        best_logprob, best = (torch.cat(column) for column in zip(*tops, strict=True))
        return out.hidden[0], out.features[0], best, best_logprob


def feature_scale(views: Sequence[View], num_capture: int) -> Tensor:
    """[C * H]: one over the root mean square of each captured layer's features, over all given positions.

    A residual stream may be 40 times unit size. Unscaled features would make fc's part of every update too large by
    that factor, and the output of the draft's layer would be negligible beside the residual."""
    features = torch.cat([view.features for view in views]).float()
    features = torch.unflatten(features, -1, (num_capture, -1))
    scale: Tensor = features.pow(2).mean((0, 2)).rsqrt()
    return scale.repeat_interleave(features.shape[-1])


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

    def __len__(self) -> int:
        return len(self._places) + len(self._waiting)

    def get(self, key: str) -> View | None:
        """A document's view; None if it is not there."""
        if key not in self._places:
            return self._waiting.get(key)
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
        kept = {} if self.cache is None else {key: self.cache.get(key) for key in keys}
        found = {key: view for key, view in kept.items() if view is not None}
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

"""The frozen target's side of training: what it computes at every position of a document.

`Teacher` runs the target over whole documents, in bfloat16. On a CPU it uses the native library, so that features are
the vectors that serving in bfloat16 computes (integer products of packed blocks differ by their rounding); on a GPU, or
without a library, it uses the torch decoder. The result for a document is a `View`, small enough to be kept on disk
(`features.py`): features and the normed last hidden state in bfloat16, and the log-sum-exp of the whole vocabulary's
logits, from which any part of the target's distribution can be computed.

The torch decoder is held in either case. Of a mixture with experts in MXFP4 it holds float32, eight times their size;
the native library runs them packed. Targets with attention sinks run in the native library alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
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
from aquiline.train.attention import PackedAttention
from aquiline.types import Int32


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

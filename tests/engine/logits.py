"""The logits of a target at every token of a text, and what a draft reads of features, as the backend of a pair
computes them."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref

import numpy as np
import torch

from aquiline.backends.base import Pair
from aquiline.backends.cpu.buffers import pointer
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.cpu.native_weights import library
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.engine.model import LoadedModels
from aquiline.engine.score import Scorer
from aquiline.types import Float32


def head_of(pair: Pair, hidden: Float32) -> Float32:
    """Logits [n, V] of hidden states [n, H]."""
    if isinstance(pair, CpuPair):
        return pair.target_model.logits(hidden, np.arange(len(hidden), dtype=np.int32))
    assert isinstance(pair, TorchPair)
    with torch.no_grad():
        return pair.decoder.logits(torch.from_numpy(hidden)).numpy()


def fused_of(pair: Pair, features: Float32) -> Float32:
    """The draft's input [n, Hd] made of the target's features [n, F]."""
    if isinstance(pair, CpuPair):
        assert pair.draft_model is not None
        fused = np.empty((len(features), pair.draft_model.model.hidden_size), np.float32)
        library().fuse(byref(pair.draft_model.fusion), pointer(features), len(features), pointer(fused))
        return fused
    assert isinstance(pair, TorchPair) and pair.head is not None
    with torch.no_grad():
        return pair.head.fuse(torch.from_numpy(features)).numpy()


def logits_of(models: LoadedModels, text: Sequence[int]) -> Float32:
    """Logits [n, V] behind each token of a text that is run whole."""
    scored = Scorer(models, max(64, len(text)))([np.array(text, np.int32)])
    return head_of(models.pair, scored.hidden)


def log_laws(models: LoadedModels, text: Sequence[int]) -> torch.Tensor:
    """The same as log-probabilities in float64."""
    return torch.from_numpy(logits_of(models, text)).double().log_softmax(-1)

"""Runs a decoder or a draft head over flat rows: by one native call where the library is there, else in torch.

Owns the output buffers of a forward. Which of the two runs is decided once, by `use_native`, logged and reported in
every result; nothing falls back at run time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol

import numpy as np
import torch
from torch import nn

from aquiline.config import Environment
from aquiline.kv import view
from aquiline.models.decoder import Decoder
from aquiline.models.eagle import DraftHead
from aquiline.ops import cpu, packed, reference
from aquiline.ops.cycle import DraftSide, NativeFusion
from aquiline.ops.packed import Arena, PackedLinear
from aquiline.ops.quantise import quantise, stored_bytes
from aquiline.ops.threads import usable_cores
from aquiline.types import Float32, Int32, KVGroup, Logprobs, Rows, RowSampling, TopK

logger = logging.getLogger(__name__)

_LINEARS = ("qkv", "o", "gate_up", "down", "head", "fc")
"""Names of the parameters that int8 and int4 are for. A tied head is quantised, the embedding it was is not."""


class TargetRunner(Protocol):
    """hidden [max_rows, H] and features [max_rows, 3H] hold the last forward's rows."""

    hidden: Float32
    features: Float32

    def forward(self, rows: Rows, kv: KVGroup) -> None:
        """Run the rows, store their keys and values, fill hidden and features."""

    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:
        """The token drawn at each of the named rows of hidden; -1 where the logits are not numbers."""

    def logits(self, row_index: Int32) -> Float32:
        """float32 [n, V] of the named rows of hidden."""

    def logprobs(self, row_index: Int32, chosen: Int32, k: int) -> Logprobs:
        """Of token chosen[i] at the i-th of the named rows of hidden, and of the k >= 0 best ids there."""

    def draw_from(self, logits: Float32, sampling: RowSampling) -> Int32:
        """The token drawn from each row of given logits [n, V]."""


class DraftRunner(Protocol):
    """One pass of the draft after the other."""

    @property
    def hidden(self) -> Float32:
        """[max_rows, H]: the last pass's outputs, as the next pass takes them."""

    def fuse(self, features: Float32) -> Float32:
        """Target features [n, 3 Ht] -> [n, H]."""

    def forward(self, rows: Rows, kv: KVGroup, g: Float32) -> None:
        """One pass over the rows, g [n, H] beside their tokens."""

    def top_k(self, row_index: Int32, k: int, sampling: RowSampling) -> TopK:
        """The best k children of each of the named rows of the last pass, as target ids: those that `draw` prefers,
        with the log-probabilities they would have by what it prefers them by."""

    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:
        """A child of each of the named rows of the last pass, as a target id: the token that the target would draw,
        with the same noise, had it the draft's logits. Any token where they are not numbers."""


def use_native(environment: Environment) -> bool:
    """Decide between the native library and torch, once, and say so."""
    reason = "AQUILINE_ISA=off" if environment.isa == "off" else cpu.missing_reason()
    if reason is None:
        cpu.select_isa(environment.isa)
        cpu.set_threads(environment.num_threads or usable_cores())
        return True
    logger.warning("native CPU library not used (%s): torch runs, slower, and trees are not bit-exact", reason)
    return False


def resolve_arithmetic(arithmetic: str, dtype: str, is_native: bool) -> str:
    """The arithmetic over weights stored as `dtype`; "auto" is the faster of those there are.

    Raises ValueError, naming the fix, for one that cannot run."""
    if arithmetic == "auto":
        has_dot = is_native and dtype == "bfloat16" and packed.has_bf16_dot()
        return "bfloat16" if has_dot else "float32"
    if arithmetic not in ("float32", "bfloat16"):
        raise ValueError(f"arithmetic={arithmetic!r}: must be one of auto, float32, bfloat16")
    if arithmetic == "float32":
        return arithmetic
    if dtype != "bfloat16":
        raise ValueError(f"arithmetic={arithmetic!r}: needs dtype='bfloat16', and dtype is {dtype!r}")
    if not is_native:
        raise ValueError(f"arithmetic={arithmetic!r}: the torch path has float32 only; use arithmetic='float32'")
    if not packed.has_bf16_dot():
        raise ValueError(f"arithmetic={arithmetic!r}: this CPU or build lacks AVX512_BF16; use arithmetic='float32'")
    return arithmetic


def weight_bytes(modules: Iterable[nn.Module], dtype: str | None) -> int:
    """Bytes of the modules' weights as they are stored, linears quantised if dtype says so; shared ones count once."""
    sizes: dict[object, int] = {}
    for module in modules:
        for name, weight in module.named_parameters(remove_duplicate=False):
            own = dtype if name.rpartition(".")[2] in _LINEARS else None
            sizes[weight.data_ptr(), own] = weight.nbytes if own is None else stored_bytes(weight, own)
    return sum(sizes.values())


def _round_linears(module: nn.Module, dtype: str) -> None:
    """Replace every linear weight by the float32 weight that its int8 or int4 codes stand for."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if name in _LINEARS:
                rounded = quantise(name, weight.data, dtype).dequantised()
                setattr(owner, name, nn.Parameter(rounded, requires_grad=False))


class NativeTarget:
    """TargetRunner over the native library; the decoder's own tensors are packed and may be dropped."""

    def __init__(self, decoder: Decoder, max_rows: int, arithmetic: str = "float32", dtype: str | None = None) -> None:
        self.model = cpu.NativeModel(decoder.weights(), arithmetic, dtype)
        H = decoder.config.hidden_size
        self.hidden = np.empty((max_rows, H), np.float32)
        self.features = np.empty((max_rows, len(decoder.capture) * H), np.float32)

    def forward(self, rows: Rows, kv: KVGroup) -> None:  # noqa: D102
        self.model.forward(kv, rows, self.hidden, self.features if self.features.size else None)

    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:  # noqa: D102
        return self.model.draw(self.hidden, row_index, sampling)

    def logits(self, row_index: Int32) -> Float32:  # noqa: D102
        return self.model.logits(self.hidden, row_index)

    def logprobs(self, row_index: Int32, chosen: Int32, k: int) -> Logprobs:  # noqa: D102
        return self.model.logprobs(self.hidden, row_index, chosen, k)

    def draw_from(self, logits: Float32, sampling: RowSampling) -> Int32:  # noqa: D102
        return cpu.draw(logits, sampling)


class NativeDraft:
    """DraftRunner over the native library."""

    def __init__(self, head: DraftHead, max_rows: int, arithmetic: str = "float32", dtype: str | None = None) -> None:
        self.config = head.config
        eps = head.config.model.rms_norm_eps
        self.model = cpu.NativeModel(head.weights(), arithmetic, dtype)
        fc = PackedLinear("fc", head.fc.data, None, arithmetic, Arena(), dtype)
        self.fusion = NativeFusion(fc, _floats(head.input_norm), _floats(head.fc_norm), eps)
        self.d2t = head.d2t.numpy().astype(np.int32)
        self.final_norm, self.eps = head.norm.detach().float().numpy(), eps
        self.raw = np.empty((max_rows, head.config.model.hidden_size), np.float32)
        self.hidden = self.raw

    def fuse(self, features: Float32) -> Float32:  # noqa: D102
        return self.fusion(features)

    def forward(self, rows: Rows, kv: KVGroup, g: Float32) -> None:  # noqa: D102
        self.model.forward(kv, rows, self.raw, None, g)
        if self.config.norm_feedback:
            self.hidden = cpu.rms_norm(self.raw[: rows.num], self.final_norm, self.eps)

    def top_k(self, row_index: Int32, k: int, sampling: RowSampling) -> TopK:  # noqa: D102
        return self.model.top_k(self.raw, row_index, k, sampling, self.d2t)

    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:  # noqa: D102
        drawn = self.model.draw(self.raw, row_index, sampling, self.d2t)
        return np.where(drawn < 0, self.d2t[0], drawn)

    def side(self, kv: KVGroup, rows: Rows) -> DraftSide:
        """This draft as a part of whole cycles."""
        return DraftSide(self.model, kv, rows, self.raw, self.fusion, self.d2t, self.config.norm_feedback)


class TorchTarget:
    """TargetRunner in torch: float32 arithmetic over weights that were rounded to their storage dtype, or to the
    values that int8 or int4 codes have natively."""

    def __init__(self, decoder: Decoder, max_rows: int, dtype: str | None = None) -> None:
        self.decoder = decoder.float()
        if dtype is not None:
            _round_linears(decoder, dtype)
        config = decoder.config
        self.windows = config.windows
        self.hidden = np.empty((max_rows, config.hidden_size), np.float32)
        self.features = np.empty((max_rows, len(decoder.capture) * config.hidden_size), np.float32)

    @torch.inference_mode()
    def forward(self, rows: Rows, kv: KVGroup) -> None:  # noqa: D102
        attn = view.PagedAttention(kv, rows, self.decoder.config.head_dim, self.windows)
        tokens, positions = (torch.from_numpy(a[: rows.num]).long() for a in (rows.tokens, rows.positions))
        out = self.decoder(tokens, positions, attn)
        self.hidden[: rows.num] = out.hidden.numpy()
        self.features[: rows.num] = out.features.numpy()

    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:  # noqa: D102
        return self.draw_from(self.logits(row_index), sampling)

    @torch.inference_mode()
    def logits(self, row_index: Int32) -> Float32:  # noqa: D102
        logits: Float32 = self.decoder.logits(torch.from_numpy(self.hidden[row_index])).numpy()
        return logits

    def logprobs(self, row_index: Int32, chosen: Int32, k: int) -> Logprobs:  # noqa: D102
        return reference.logprobs(torch.from_numpy(self.logits(row_index)), torch.from_numpy(chosen).long(), k)

    def draw_from(self, logits: Float32, sampling: RowSampling) -> Int32:  # noqa: D102
        return _draw(torch.from_numpy(logits), sampling)


class TorchDraft:
    """DraftRunner in torch."""

    def __init__(self, head: DraftHead, max_rows: int, dtype: str | None = None) -> None:
        self.head = head.float()
        if dtype is not None:
            _round_linears(head, dtype)
        self.raw = np.empty((max_rows, head.config.model.hidden_size), np.float32)
        self.hidden = self.raw

    @torch.inference_mode()
    def fuse(self, features: Float32) -> Float32:  # noqa: D102
        fused: Float32 = self.head.fuse(torch.from_numpy(features)).numpy()
        return fused

    @torch.inference_mode()
    def forward(self, rows: Rows, kv: KVGroup, g: Float32) -> None:  # noqa: D102
        attn = view.PagedAttention(kv, rows, self.head.config.model.head_dim, self.head.config.model.windows)
        tokens, positions = (torch.from_numpy(a[: rows.num]).long() for a in (rows.tokens, rows.positions))
        out = self.head(torch.from_numpy(g), tokens, positions, attn)
        self.raw[: rows.num] = out.numpy()
        self.hidden = self.head.feedback(out).numpy()

    @torch.inference_mode()
    def top_k(self, row_index: Int32, k: int, sampling: RowSampling) -> TopK:  # noqa: D102
        logits = self.head.logits(torch.from_numpy(self.raw[row_index]))
        targets = self.head.target_ids(torch.arange(logits.shape[1]))
        for row, s in zip(logits, sampling, strict=True):
            if s["temperature"] > 0:
                row.div_(float(s["temperature"])).add_(reference.gumbel(int(s["seed"]), int(s["position"]), targets))
        ids, logprobs = reference.top_k(logits, k)
        return TopK(targets[ids].numpy().astype(np.int32), logprobs.numpy())

    @torch.inference_mode()
    def draw(self, row_index: Int32, sampling: RowSampling) -> Int32:  # noqa: D102
        logits = self.head.logits(torch.from_numpy(self.raw[row_index]))
        ids = self.head.target_ids(torch.arange(logits.shape[1]))
        drawn = _draw(logits, sampling, ids)
        return np.where(drawn < 0, np.int32(ids[0]), drawn)


def _draw(logits: torch.Tensor, sampling: RowSampling, ids: torch.Tensor | None = None) -> Int32:
    return np.array([
        reference.draw(
            row, float(s["temperature"]), int(s["top_k"]), float(s["top_p"]), float(s["min_p"]), int(s["seed"]),
            int(s["position"]), ids,
        )
        for row, s in zip(logits, sampling, strict=True)
    ], np.int32)  # fmt: skip


def _floats(weight: torch.Tensor | None) -> Float32 | None:
    return None if weight is None else weight.detach().float().contiguous().numpy()

"""Linear weights as int8 or int4 codes times scales: how a weight is rounded, and what the rounded weight is.

Symmetric, without zero points; multiplied in float32 (csrc/formats says in which order). Every step is exact or
correctly rounded per element, and no sum is taken, so a checkpoint gives the same codes on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

QUANTISED = ("int8", "int4")

LINEARS = ("qkv", "o", "gate_up", "down", "head", "fc")
"""Names of the parameters that int8 and int4 store. A tied head is quantised; the embedding it shares is not."""
GROUP = 32
"""Inputs that share one int4 scale."""

_CHUNK = 1 << 18  # values rounded at once, few enough that the float32 values in between stay in the cache


@dataclass(frozen=True, eq=False)
class QuantisedWeight:
    """A weight [N, K] as int8 codes [N, K] times scales: float32 [N, 1] (int8) or bfloat16 [N, K / GROUP] (int4)."""

    codes: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """The float32 weight [N, K] that these codes stand for; int8 rounds each product once."""
        n, num_groups = self.scales.shape
        return (self.codes.view(n, num_groups, -1).float() * self.scales.float()[..., None]).view(n, -1)


def quantise(name: str, weight: Tensor, dtype: str) -> QuantisedWeight:
    """Round a weight [N, K] to int8 (8 bits and a float32 scale per output) or int4 (4.5 bits), ties to even.

    int8 takes codes -127 .. 127 and maps the largest magnitude of a row to 127. int4 takes codes -8 .. 7 over groups of
    GROUP inputs and maps the value of largest magnitude to -8, whatever its sign: a ninth less error than +-7. Codes
    are chosen for the scale as stored, so that bfloat16 scales cost what float32 ones would.
    Raises ValueError for an unknown dtype, a width that is no multiple of GROUP in int4, and values that are not
    finite."""
    if dtype not in QUANTISED:
        raise ValueError(f"dtype={dtype!r}: linears are quantised to one of {', '.join(QUANTISED)}")
    n, k = weight.shape
    if dtype == "int4" and k % GROUP != 0:
        raise ValueError(f"{name} is [{n}, {k}]: dtype='int4' needs a width that is a multiple of {GROUP}; use 'int8'")
    if not torch.isfinite(torch.stack(weight.aminmax())).all():
        raise ValueError(f"{name} holds values that are not finite: dtype={dtype!r} cannot store them; use 'bfloat16'")
    step = max(1, _CHUNK // k)
    codes = torch.empty(n, k, dtype=torch.int8)
    scales = torch.empty(n, 1) if dtype == "int8" else torch.empty(n, k // GROUP, dtype=torch.bfloat16)
    for i in range(0, n, step):
        part = _round(weight[i : i + step].detach().float(), dtype)
        codes[i : i + step], scales[i : i + step] = part.codes, part.scales
    return QuantisedWeight(codes, scales)


def stored_bytes(weight: Tensor, dtype: str) -> int:
    """Bytes that the codes and scales of a weight [N, K] take."""
    n, k = weight.shape
    return n * (k + 4) if dtype == "int8" else n * k // 2 + n * k // GROUP * 2


def _round(rows: Tensor, dtype: str) -> QuantisedWeight:
    groups = rows.view(len(rows), 1 if dtype == "int8" else -1, rows.shape[1] if dtype == "int8" else GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if dtype == "int8":
        limits, scales = (-127, 127), torch.maximum(high, -low) / 127
    else:
        limits, scales = (-8, 7), (torch.where(high >= -low, high, low) / -8).bfloat16()
    # A scale of zero means that all values are zero, or so small that their scale rounds to zero.
    codes = torch.round(groups / torch.where(scales == 0, torch.inf, scales.float())).clamp_(*limits)
    return QuantisedWeight(codes.to(torch.int8).view_as(rows), scales.squeeze(-1))


def weight_bytes(modules: Iterable[nn.Module], dtype: str | None) -> int:
    """Bytes of the modules' weights as they are stored, linears quantised if dtype says so; shared ones count once."""
    sizes: dict[object, int] = {}
    for module in modules:
        for name, weight in module.named_parameters(remove_duplicate=False):
            if weight.is_meta:  # in packed blocks, which are counted elsewhere
                continue
            own = dtype if dtype in QUANTISED and name.rpartition(".")[2] in LINEARS else None
            sizes[weight.data_ptr(), own] = weight.nbytes if own is None else stored_bytes(weight, own)
    return sum(sizes.values())

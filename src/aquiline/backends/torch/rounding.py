"""Linear weights rounded to the values that int8 or int4 codes stand for, in torch, on any device: the twin of
`ops/quantise.py`, bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from aquiline.ops.quantise import GROUP, check_width


def rounded(name: str, weight: Tensor, dtype: str) -> Tensor:
    """The float32 weight [N, K] that the int8 or int4 codes of a weight [N, K] stand for.

    Raises ValueError as `quantise` does."""
    n, k = weight.shape
    check_width(name, (n, k), dtype)
    if not torch.isfinite(torch.stack(weight.aminmax())).all():
        raise ValueError(f"{name} holds values that are not finite: dtype={dtype!r} cannot store them; use 'bfloat16'")
    groups = weight.detach().float().view(n, 1 if dtype == "int8" else -1, k if dtype == "int8" else GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    if dtype == "int8":
        limits, scales = (-127, 127), torch.where(high > -low, high, -low) / 127
    else:
        limits, scales = (-8, 7), (torch.where(high >= -low, high, low) / -8).bfloat16().float()
    codes = torch.round(groups / torch.where(scales == 0, torch.inf, scales)).clamp_(*limits)
    return (codes.to(torch.int8).float() * scales).view(n, k)

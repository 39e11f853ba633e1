"""Torch's tensors as numpy arrays and back, without a copy where memory allows; numpy itself has no bfloat16."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aquiline.blocks import FLOATS, Array


def array_of(tensor: Tensor) -> Array:
    """A tensor's values as a contiguous array; on a CPU the two share memory if the tensor is contiguous."""
    values = tensor.detach().cpu().contiguous()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(FLOATS["bfloat16"])
    return values.numpy()


def tensor_of(array: Array) -> Tensor:
    """An array's values as a tensor; the two share memory if the array is contiguous and may be written."""
    values = np.require(array, requirements=["C", "W"])
    if values.dtype == FLOATS["bfloat16"]:
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)

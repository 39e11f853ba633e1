"""Which backend runs a pair on this machine. Decided once, when the pair is loaded, and stated in every result."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aquiline.backends.base import Pair
from aquiline.backends.cpu.native_pair import (
    CpuPair,
    configure,
    missing_reason,
    resolve_arithmetic,
    resolve_kv_dtype,
)
from aquiline.config import Environment, ParallelMode
from aquiline.errors import NativeError
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.models.shares import Share

logger = logging.getLogger(__name__)
LoadPair = Callable[[], tuple[ModelWeights, DraftWeights | None]]


def runs_natively(device: str, environment: Environment) -> bool:
    """Whether the native library runs pairs on this device."""
    return device == "cpu" and missing_reason(environment) is None


def is_gpu(device: str) -> bool:
    """Whether kernels of ops/triton run pairs on this device."""
    return device.partition(":")[0] == "cuda"


def path_of(device: str, arithmetic: str, kv_dtype: str, dtype: str, environment: Environment) -> dict[str, str]:
    """How weights stored as `dtype` run, before anything is loaded: the names of the backend (path), of the arithmetic
    and of the storage of keys and values (kv_dtype).

    Raises ValueError for an arithmetic or a kv_dtype that cannot run."""
    if is_gpu(device):
        return {"path": "gpu", "arithmetic": dtype, "kv_dtype": dtype}
    how = {"path": "torch", "arithmetic": "float32", "kv_dtype": resolve_kv_dtype(kv_dtype, dtype)}
    if runs_natively(device, environment):
        configure(environment)  # which arithmetics there are depends on the instruction set
        how |= {"path": CpuPair.name, "arithmetic": resolve_arithmetic(arithmetic, dtype)}
    return how


def new_pair(
    target: ModelWeights, draft: DraftWeights | None, dtype: str, arithmetic: str, kv_dtype: str, device: str,
    environment: Environment, draft_dtype: str | None = None, num_ranks: int = 1, load: LoadPair | None = None,
    mode: ParallelMode = "gather",
) -> Pair:  # fmt: skip
    """Pack weights for the native library where it can run on this device, else for torch. draft_dtype: dtype. load:
    finds the weights again in the processes of num_ranks ranks. mode: what these exchange.

    Raises ValueError for settings that the backend does not have, NativeError where there is neither the native library
    nor torch."""
    reason = missing_reason(environment) if device == "cpu" else f"device={device!r}"
    if num_ranks > 1:
        refuse_parallel(num_ranks, mode, reason is None, {dtype, draft_dtype})
    elif mode != "gather":
        logger.warning("parallel_mode=%r has no effect: one rank has nothing to exchange", mode)
    if is_gpu(device) and num_ranks == 1:
        return gpu_pair(target, draft, dtype, arithmetic, kv_dtype, device, draft_dtype)
    if reason is None:
        configure(environment)
        return CpuPair(target, draft, dtype, arithmetic, kv_dtype, draft_dtype)
    try:
        from aquiline.backends.torch.torch_pair import TorchPair
    except ImportError:
        raise NativeError(
            f"the native CPU library cannot run ({reason}), and torch is not installed: install a C++ compiler (g++) "
            "and then aquiline again, or pip install 'aquiline[torch]', which runs without it, slower"
        ) from None
    if device == "cpu":
        logger.warning(
            "native CPU library not used (%s): torch runs, slower, and trees are not bit-exact; "
            "`aquiline doctor` says what helps",
            reason,
        )
    if arithmetic in ("bfloat16", "bfloat16_tiles", "int8"):
        raise ValueError(f"arithmetic={arithmetic!r}: the torch path has float32 only; use arithmetic='float32'")
    if arithmetic not in ("auto", "float32"):
        raise ValueError(f"arithmetic={arithmetic!r}: must be one of auto, float32, bfloat16, bfloat16_tiles, int8")
    if num_ranks == 1:
        return TorchPair(target, draft, dtype, kv_dtype, device, draft_dtype)
    from aquiline.backends.torch.parallel import ParallelPair

    if load is None:
        raise ValueError(
            f"tensor_parallel_size={num_ranks}: every rank reads a checkpoint, and these weights have none"
        )
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "device": device, "draft_dtype": draft_dtype}
    shares = [Share(rank, num_ranks, mode) for rank in range(num_ranks)]
    return ParallelPair(shares, load, target, draft, settings)


def gpu_pair(
    target: ModelWeights, draft: DraftWeights | None, dtype: str, arithmetic: str, kv_dtype: str, device: str,
    draft_dtype: str | None,
) -> Pair:  # fmt: skip
    """A pair on a CUDA device. Raises ValueError for settings that it does not have, and where Triton is missing."""
    try:
        from aquiline.backends.gpu.gpu_pair import GpuPair
    except ImportError as error:
        raise ValueError(
            f"device={device!r}: {error.name} is not installed; pip install torch triton, or use device='cpu'"
        ) from None
    if arithmetic not in ("auto", dtype):
        raise ValueError(f"arithmetic={arithmetic!r}: a GPU multiplies weights as they are stored; use 'auto'")
    return GpuPair(target, draft, dtype, kv_dtype, device, draft_dtype)


def refuse_parallel(num_ranks: int, mode: ParallelMode, is_native: bool, dtypes: set[str | None]) -> None:
    """Raises ValueError where several ranks cannot share a pair: in the native library, and by the inputs of linears
    whose scales are those of all inputs."""
    if is_native:
        raise ValueError(f"tensor_parallel_size={num_ranks}: the native library runs on one rank; use device='torch'")
    if mode == "reduce" and "int8" in dtypes:
        raise ValueError(
            "parallel_mode='reduce': splits the inputs that a scale of dtype='int8' is of; use 'gather', or 'bfloat16'"
        )

"""A pair of models on one GPU."""

from __future__ import annotations

import torch

from aquiline.backends.base import Backend, Sizes
from aquiline.backends.gpu.gpu_backend import GpuBackend
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel, DeviceStorage
from aquiline.blocks import MXFP4, Parts
from aquiline.errors import OutOfMemory
from aquiline.models.model_weights import DraftWeights, LayerWeights, ModelWeights, MoeWeights
from aquiline.ops.control_groups import free_memory
from aquiline.ops.triton.heads import check_head_size
from aquiline.ops.triton.launch import IS_INTERPRETED
from aquiline.ops.triton.tile_table import TileTable
from aquiline.spec.match_events import MatchEvents
from aquiline.spec.text_index import SuffixIndex

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LEAST_CAPABILITY = (8, 0)
"""The first devices that multiply bfloat16."""


class GpuPair:
    """Target and draft on one CUDA device, or on a CPU where Triton's interpreter runs the kernels.

    Weights, keys and values are stored in `dtype`; sums are float32. table: how kernels are cut, by default as they
    were tuned for this device. Raises ValueError for a device, a dtype or a geometry that has no kernels here,
    OutOfMemory where the weights do not fit."""

    name, is_exact, draft_version = "gpu", True, 0

    def __init__(
        self,
        target: ModelWeights,
        draft: DraftWeights | None,
        dtype: str,
        kv_dtype: str = "auto",
        device: str = "cuda",
        draft_dtype: str | None = None,
        table: TileTable | None = None,
    ) -> None:
        check_device(device)
        for setting, value in (("dtype", dtype), ("draft_dtype", draft_dtype or dtype)):
            if value not in DTYPES:
                raise ValueError(f"{setting}={value!r}: on a GPU must be one of {', '.join(DTYPES)}")
        if kv_dtype not in ("auto", dtype):
            raise ValueError(f"kv_dtype={kv_dtype!r}: on a GPU keys are stored as weights are; use 'auto' or {dtype!r}")
        self.target, self.draft = target.config, None if draft is None else draft.config
        for own in (target.config, *(() if draft is None else (draft.config.model,))):
            check_head_size(f"family={own.family!r}", own.head_dim)
        if any(part.kind != MXFP4 for layer in target.layers for part in experts_of(layer)):
            raise ValueError(f"family={target.config.family!r}: only experts in MXFP4 have kernels; use device='cpu'")
        self.arithmetic = self.kv_dtype = dtype
        self.device = torch.device(device)
        self._table = TileTable.of(self._name) if table is None else table
        try:
            storage = DeviceStorage(DTYPES[dtype], self.device)
            self._target = DeviceModel.of(target, storage)
            own = DeviceStorage(DTYPES[draft_dtype or dtype], self.device)
            self._draft = None if draft is None else DeviceDraft.of(draft, own, target, self._target.embed)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(f"the weights do not fit into the memory of {device}: {error}") from None

    def open(self, sizes: Sizes) -> Backend:  # noqa: D102
        try:
            return GpuBackend(self._target, self._draft, DTYPES[self.kv_dtype], sizes, self._table)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{sizes.num_pages} pages of {sizes.page_size} tokens do not fit into the memory of {self.device}; "
                f"lower cache_fraction or num_pages: {error}"
            ) from None

    def replace_draft(self, draft: DraftWeights) -> None:
        """Raises ValueError: programs hold the addresses of the draft that they were built with."""
        raise ValueError(f"device={str(self.device)!r}: the draft on a GPU cannot be replaced; use device='cpu'")

    def new_index(self, min_length: int, events: MatchEvents) -> SuffixIndex:  # noqa: D102
        return SuffixIndex(min_length, events)

    def kv_bytes_per_token(self) -> tuple[int, int]:  # noqa: D102
        size = DTYPES[self.kv_dtype].itemsize
        if self.draft is None:
            return self.target.kv_values_per_token * size, 0
        model = self.draft.model
        return (
            self.target.kv_values_per_token * size,
            model.kv_values_per_token * size + model.hidden_size * torch.float32.itemsize,
        )

    def free_bytes(self) -> int:  # noqa: D102
        return int(torch.cuda.mem_get_info(self.device)[0]) if self.device.type == "cuda" else free_memory()

    def system(self) -> dict[str, object]:  # noqa: D102
        own = {"device": str(self.device), "gpu": self._name, "torch": torch.__version__}
        return {"isa": "triton", "threads": 1} | own

    @property
    def _name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "Triton's interpreter"

    def close(self) -> None:
        """One process has nothing to end."""


def experts_of(layer: LayerWeights) -> Parts:
    """The linears of a layer's experts, if it has any."""
    return (*layer.mlp.gate_up, *layer.mlp.down) if isinstance(layer.mlp, MoeWeights) else ()


def check_device(device: str) -> None:
    """Raises ValueError for a device on which the kernels do not run."""
    kind = device.partition(":")[0]
    if kind == "cpu" and IS_INTERPRETED:
        return
    if kind != "cuda":
        raise ValueError(f"device={device!r}: the kernels run on CUDA devices; use device='cuda' or 'cpu'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={device!r}: torch has no CUDA device here; use device='cpu'")
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        have, least = (".".join(map(str, own)) for own in (capability, LEAST_CAPABILITY))
        raise ValueError(f"device={device!r}: has compute capability {have}, and {least} is needed; use device='cpu'")

"""A pair of models as modules on one device."""

from __future__ import annotations

import warnings

import numpy as np
import torch

from aquiline.backends.base import Backend, Sizes, check_replaces
from aquiline.backends.torch.decoder import Decoder
from aquiline.backends.torch.eagle import DraftHead
from aquiline.backends.torch.ranks import ALONE, Ranks
from aquiline.backends.torch.rounding import rounded
from aquiline.backends.torch.slot_state import SlotState
from aquiline.backends.torch.torch_backend import TorchBackend
from aquiline.models.model_weights import DraftWeights, ModelWeights
from aquiline.ops.control_groups import free_memory
from aquiline.ops.quantise import LINEARS, QUANTISED
from aquiline.ops.torch_arrays import tensor_of
from aquiline.spec.match_events import MatchEvents
from aquiline.spec.text_index import SuffixIndex

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}


class TorchPair:
    """Target and draft in torch: float32 arithmetic over weights that were rounded to their storage dtype, or to the
    values that the native library's int8 or int4 codes stand for.

    device "torch" is the CPU; "cuda" is accepted where torch has one; nothing was measured there. ranks: those that
    share the pair; of the weights, which are always whole, this rank's are packed. Raises ValueError for a device or a
    kv_dtype that does not exist here."""

    name, is_exact, arithmetic = "torch", False, "float32"

    def __init__(
        self,
        target: ModelWeights,
        draft: DraftWeights | None,
        dtype: str,
        kv_dtype: str = "auto",
        device: str = "cpu",
        draft_dtype: str | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        device = "cpu" if device == "torch" else device
        kind, share = device.partition(":")[0], ranks.share
        if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
            raise ValueError(f"device={device!r}: torch has no such device here; use device='cpu'")
        if kind == "cuda":
            warnings.warn(f"device={device!r}: the torch backend was not measured on GPUs", stacklevel=2)
        self.kv_dtype = kv_dtype if kv_dtype != "auto" else ("float32" if dtype == "float32" else "bfloat16")
        if self.kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype={kv_dtype!r}: must be one of auto, {', '.join(KV_DTYPES)}")
        if kind == "cuda" and share.ranks > 1:
            device = f"cuda:{share.rank}"
        self.device, self.head, self.num_ranks, self.draft_version = device, None, share.ranks, 0
        self._draft_dtype = draft_dtype or dtype
        self.target, self.draft = target.config, None if draft is None else draft.config
        own = share.target(target)
        shifts = [own.key_shift(layer.attention) for layer in own.layers]
        found = [tensor_of(shift) for shift in shifts if shift is not None]  # of all layers, or of none
        self._key_shifts = torch.stack(found).to(device) if found else None
        self.decoder = Decoder.of(own, ranks).float().to(device)
        if draft is not None:
            draft = share.draft(draft, target, own)
            embed = self.decoder.embed if draft.model.embed is own.embed else None
            self.head = DraftHead.of(draft, embed, ranks).requires_grad_(False).float().to(device)
        for module, storage in ((self.decoder, dtype), (self.head, self._draft_dtype)):
            if module is not None and storage in QUANTISED:
                round_linears(module, storage)

    def replace_draft(self, draft: DraftWeights) -> None:  # noqa: D102
        old = self.head
        check_replaces(self.draft, None if old is None else old.d2t.numpy(force=True).astype(np.int32), draft)
        assert old is not None
        head = DraftHead.of(draft, old.embed).requires_grad_(False).float().to(self.device)
        if self._draft_dtype in QUANTISED:
            round_linears(head, self._draft_dtype)
        head.fc, head.input_norm, head.fc_norm = old.fc, old.input_norm, old.fc_norm
        self.head = head
        self.draft_version += 1

    def open(self, sizes: Sizes) -> Backend:  # noqa: D102
        state = SlotState(sizes, self.decoder.embed.device)
        return TorchBackend(
            self.decoder, self.head, KV_DTYPES[self.kv_dtype], state, lambda: self.head, self._key_shifts
        )

    def new_index(self, min_length: int, events: MatchEvents) -> SuffixIndex:  # noqa: D102
        return SuffixIndex(min_length, events)

    def kv_bytes_per_token(self) -> tuple[int, int]:
        """As in backends/base.py: of all ranks, which share this machine's memory; of one where each has a GPU."""
        draft, times = 0, self.num_ranks if self.device == "cpu" else 1
        if self.head is not None:
            model = self.head.config.model
            draft = model.kv_bytes_per_token(self.kv_dtype) + model.hidden_size * torch.float32.itemsize
        return times * self.decoder.config.kv_bytes_per_token(self.kv_dtype), times * draft

    def free_bytes(self) -> int:
        """Free memory of the CUDA device; of this machine for every other device."""
        embed = self.decoder.embed
        return int(torch.cuda.mem_get_info(embed.device)[0] if embed.is_cuda else free_memory())

    def system(self) -> dict[str, object]:  # noqa: D102
        how: dict[str, object] = {"isa": "torch", "threads": torch.get_num_threads(), "device": self.device}
        return how | {"torch": torch.__version__}

    def close(self) -> None:
        """One process has nothing to end."""


def round_linears(module: Decoder | DraftHead, dtype: str) -> None:
    """Replace every linear weight by the float32 weight that its int8 or int4 codes stand for."""
    for owner in module.modules():
        for name, weight in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if name in LINEARS:
                values = rounded(name, weight.data, dtype)
                setattr(owner, name, torch.nn.Parameter(values, requires_grad=False))

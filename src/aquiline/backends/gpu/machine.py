"""What a program is for, and what all programs of a backend share."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from aquiline.backends.gpu.forward import Workspace
from aquiline.backends.gpu.mailbox import MailedState
from aquiline.backends.gpu.pages import GpuPages
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel
from aquiline.ops.triton.head_draw import DrawRows
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tree_rows import DeviceSlots
from aquiline.spec.drafting import Drafting


@dataclass(frozen=True)
class Bucket:
    """What a program is for. way: how its trees grow, NoDraft for plain decoding; num_decodes: a power of two; spans:
    of keys that a row may see; keeps_features: whether any of its slots may ever ask for the draft; is_checked: whether
    a kernel checks what the trees' rows see."""

    way: Drafting
    num_decodes: int
    spans: int
    keeps_features: bool
    is_checked: bool = False


@dataclass(frozen=True, eq=False)
class DraftParts:
    """A draft model, its pages, and the target's fused features [places, H]."""

    draft: DeviceDraft
    pages: GpuPages
    fused: Tensor


@dataclass(frozen=True, eq=False)
class Machine:
    """What all programs of a backend share: models, pages, the slots' state and scratch."""

    target: DeviceModel
    pages: GpuPages
    state: MailedState
    workspace: Workspace
    parts: DraftParts | None

    @property
    def slots(self) -> DeviceSlots:
        """The slots' state as kernels read it."""
        s = self.state
        return DeviceSlots(s.root, s.draft_end, s.first_draft_key, s.history, s.table, s.sizes.page_size)

    def decodes(self, count: int) -> tuple[Tensor, ...]:
        """Three tensors int32 [count], which the message fills: the slots that decode, those whose trees grow, -1 for
        none, and the nodes of each tree."""
        return tuple(self.state.more.view(3, -1)[:, :count])

    def drawing(self, rows: DeviceRows, ahead: int) -> DrawRows:
        """How rows draw the token that stands `ahead` of their positions."""
        return DrawRows(rows.slots, rows.positions, self.state.temperature, self.state.seed, ahead)

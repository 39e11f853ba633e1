"""The roofline of a model and a device as a user names them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aquiline.bench.theory.ceilings import ceilings_of
from aquiline.bench.theory.choice import LimitsChoice, StorageChoice
from aquiline.bench.theory.measure import OnStage
from aquiline.bench.theory.roofline import Roofline
from aquiline.blocks import is_packed
from aquiline.models.counting import assumed_draft, read_draft_shape, read_shape
from aquiline.models.known_pairs import checkpoints
from aquiline.models.shape import DraftShape, ModelShape, Precision, precision_of


@dataclass(frozen=True)
class PairShapes:
    """A target, what drafts for it and how that is stored."""

    target: ModelShape
    draft: DraftShape | None
    draft_precision: Precision

    def roofline(self, device: LimitsChoice, on_stage: OnStage) -> Roofline:
        """What the device allows; on_stage is told what is measured. Raises ValueError as ceilings_of does."""
        ceilings = ceilings_of(device, self.target.precision.layers.name, on_stage)
        return Roofline(self.target, self.draft, self.draft_precision, ceilings)


def pair_of(model: str | None, draft: str | None, storage: StorageChoice) -> PairShapes:
    """The shapes of `model`, by default the default pair's. draft "none": without; None: a known pair's own, else a
    typical head."""
    named = checkpoints(model, draft)
    target = read_shape(named.target, storage.dtype, storage.kv_dtype)
    head = _draft(named.draft, target)
    precision = target.precision
    dtype = storage.draft_dtype or ("int4" if is_packed(precision.layers.name) else precision.plain.name)
    return PairShapes(target, head, precision_of(dtype, storage.kv_dtype))


def _draft(draft: str | Path | None, target: ModelShape) -> DraftShape | None:
    if draft == "none":
        return None
    return assumed_draft(target) if draft is None else read_draft_shape(draft, target)

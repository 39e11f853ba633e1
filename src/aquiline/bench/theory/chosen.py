"""The roofline of a model and a device as a user names them."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.bench.theory.ceilings import ceilings_of
from aquiline.bench.theory.choice import Choice, Storage
from aquiline.bench.theory.configs import assumed_draft, read_draft_shape, read_shape
from aquiline.bench.theory.measure import OnStage
from aquiline.bench.theory.roofline import Roofline
from aquiline.bench.theory.shapes import DraftShape, ModelShape, Precision, precision_of
from aquiline.engine.bundled import BUNDLED_DRAFT, BUNDLED_TARGET


@dataclass(frozen=True)
class Pair:
    """A target, what drafts for it and how that is stored."""

    target: ModelShape
    draft: DraftShape | None
    draft_precision: Precision

    def roofline(self, device: Choice, on_stage: OnStage) -> Roofline:
        """What the device allows; on_stage is told what is measured. Raises ValueError as ceilings_of does."""
        ceilings = ceilings_of(device, self.target.precision.plain.name, on_stage)
        return Roofline(self.target, self.draft, self.draft_precision, ceilings)


def pair_of(model: str | None, draft: str | None, storage: Storage) -> Pair:
    """The shapes of `model`, by default the bundled pair's. draft "none": without; None: the bundled one, or a typical
    head for a model that is named."""
    target = read_shape(model or BUNDLED_TARGET, storage.dtype, storage.kv_dtype)
    head = _draft(model, draft, target)
    return Pair(target, head, precision_of(storage.draft_dtype or target.precision.plain.name, storage.kv_dtype))


def _draft(model: str | None, draft: str | None, target: ModelShape) -> DraftShape | None:
    if draft == "none":
        return None
    if draft is not None:
        return read_draft_shape(draft, target)
    return assumed_draft(target) if model is not None else read_draft_shape(BUNDLED_DRAFT, target)

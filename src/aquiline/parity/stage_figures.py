"""How far a run's stages are from a reference's, and which stage is the first that is too far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from aquiline.parity.record import Row, StageRecord, order_of
from aquiline.types import Float32

TOP = 5


@dataclass(frozen=True)
class Tolerance:
    """cosine: the least of a row. relative: the most that a row's difference may measure of the reference's row.
    top5: the least share of the reference's five highest logits among the run's five. rows: the least share of rows
    within these bounds."""

    cosine: float
    relative: float
    top5: float
    rows: float = 1.0


EXACT, ROUNDED = Tolerance(0.9999, 0.01, 0.99), Tolerance(0.98, 0.2, 0.8)
"""Of float32 weights multiplied in float32, and of all others. docs/parity.md has the measurements."""
MIXTURE_ROWS = 0.8
"""Rounding changes which experts a row takes where two score nearly alike; the row is then another one."""


def tolerance_of(storage: str, arithmetic: str, is_mixture: bool) -> Tolerance:
    """The default tolerance of a model whose weights are stored and multiplied so."""
    if storage == "float32" and arithmetic == "float32":
        return EXACT
    return replace(ROUNDED, rows=MIXTURE_ROWS) if is_mixture else ROUNDED


@dataclass(frozen=True, eq=False)
class RowFigures:
    """One figure a row, [n]: mean and maximum absolute difference, cosine, the difference's norm over the reference's,
    whether the highest logit is the same, share of the five highest. The last two are NaN where they mean nothing."""

    mean: Float32
    max: Float32
    cosine: Float32
    relative: Float32
    argmax: Float32
    top5: Float32


@dataclass(frozen=True, eq=False)
class StageFigures:
    """A stage at the rows that both have, those of the text before drafted ones. is_bad [n]: rows outside the bounds;
    is_good: so few are, and the logits' five highest agree so often, as the tolerance asks."""

    stage: str
    rows: list[Row]
    figures: RowFigures
    is_bad: np.ndarray[tuple[int], np.dtype[np.bool_]]
    is_good: bool

    @property
    def first_bad(self) -> Row:
        """The first row outside the tolerance; if there is none, the one whose five highest agree least."""
        return self.rows[int(np.argmax(self.is_bad) if self.is_bad.any() else np.argmin(self.figures.top5))]

    @property
    def share_good(self) -> float:
        """The share of rows within the tolerance; of drafted tokens, of those among the reference's best."""
        return float(np.mean(self.figures.top5 if self.stage == "draft.tokens" else ~self.is_bad))


def figures_of(stage: str, ours: Float32, theirs: Float32) -> RowFigures:
    """Figures of rows [n, W] beside the reference's. Of logits the row's mean is taken off, which changes no
    probability."""
    if stage == "draft.tokens":
        return _tokens(ours, theirs)
    if stage.endswith("logits"):
        ours, theirs = (each - each.mean(1, keepdims=True) for each in (ours, theirs))
    difference, nothing = np.abs(ours - theirs), np.full(len(ours), np.nan, np.float32)
    norms = [np.linalg.norm(each.astype(np.float64), axis=1) for each in (ours, theirs, ours - theirs)]
    product = np.einsum("nw,nw->n", ours.astype(np.float64), theirs)
    is_same = norms[2] == 0
    cosine = np.where(is_same, 1.0, product / np.maximum(norms[0] * norms[1], 1e-30))
    relative = np.where(is_same, 0.0, norms[2] / np.maximum(norms[1], 1e-30))
    argmax = top5 = nothing
    if stage.endswith("logits"):
        best = [np.argsort(-each, axis=1, kind="stable")[:, :TOP] for each in (ours, theirs)]
        argmax = (best[0][:, 0] == best[1][:, 0]).astype(np.float32)
        top5 = np.array([np.isin(a, b).mean() for a, b in zip(*best, strict=True)], np.float32)
    cosine, relative = (np.nan_to_num(each, nan=bad) for each, bad in ((cosine, -1.0), (relative, np.inf)))
    return RowFigures(difference.mean(1), difference.max(1), cosine, relative, argmax, top5)


def _tokens(ours: Float32, theirs: Float32) -> RowFigures:
    """Of drafted tokens, -1 where none was: whether the first is the reference's, and how many are among its best."""
    is_there, nothing = ours >= 0, np.full(len(ours), np.nan, np.float32)
    among = np.array([np.isin(a, b) for a, b in zip(ours, theirs, strict=True)]) & is_there
    top5 = (among.sum(1) / np.maximum(is_there.sum(1), 1)).astype(np.float32)
    return RowFigures(nothing, nothing, nothing, nothing, (ours[:, 0] == theirs[:, 0]).astype(np.float32), top5)


def compare_stage(
    stage: str, ours: Mapping[Row, Float32], theirs: Mapping[Row, Float32], tolerance: Tolerance
) -> StageFigures | None:
    """A stage at the rows that both have; None if there is none. Raises ValueError for rows of different widths."""
    rows = sorted((row for row in ours if row in theirs), key=lambda row: (row.depth, len(row.tokens), row))
    if not rows:
        return None
    mine, other = (np.stack([each[row] for row in rows]) for each in (ours, theirs))
    if mine.shape != other.shape and stage != "draft.tokens":
        raise ValueError(f"{stage}: rows have {mine.shape[1]} values here and {other.shape[1]} in the reference")
    found = figures_of(stage, mine, other)
    with np.errstate(invalid="ignore"):  # of drafted tokens only the five best count
        is_bad = (found.cosine < tolerance.cosine) | (found.relative > tolerance.relative)
    agrees = stage.rpartition(".")[2] not in ("logits", "tokens") or float(found.top5.mean()) >= tolerance.top5
    return StageFigures(stage, rows, found, is_bad, bool(agrees and 1 - is_bad.mean() >= tolerance.rows))


def compare(ours: StageRecord, theirs: StageRecord, tolerances: Mapping[str, Tolerance]) -> list[StageFigures]:
    """All stages that both have, in the order they are computed; tolerances by model, target and draft."""
    found = []
    for stage in sorted(set(ours.stages) & set(theirs.stages), key=order_of):
        tolerance = tolerances[stage.partition(".")[0]]
        figures = compare_stage(stage, ours.stages[stage], theirs.stages[stage], tolerance)
        found += [] if figures is None else [figures]
    return found

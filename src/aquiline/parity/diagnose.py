"""Why a stage differs: the reference is run again under each mistake that implementations make, and the mistake under
which the stage agrees is named.

Each hypothesis says what an implementation would have done, as a change of the reference's fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from aquiline.parity.draft_run import DraftRun
from aquiline.parity.record import StageRecord, order_of
from aquiline.parity.reference_draft import Array, Layer, ReferenceDraft, ReferenceRope, normed
from aquiline.parity.stage_figures import StageFigures, Tolerance, compare

if TYPE_CHECKING:  # which needs torch
    from aquiline.parity.transformers_target import TransformersTarget

CLEAR, MOST = 0.5, 0.9
"""A hypothesis must leave less than this share of the stage's difference, and this share of its rows must agree: all
rows of the phase in which the stage differs first, since the rows at the ends of chunks have no next key to see."""


@dataclass(frozen=True)
class Diagnosis:
    """The first stage that differs, at which position, in which phase. causes: what would explain it, the best first;
    () if nothing does, None if nothing was tried."""

    stage: str
    position: int
    phase: str
    causes: tuple[str, ...] | None = None


Fields = dict[str, Any]
"""Fields of the reference that a mistake replaces."""


def of_ropes(rope: ReferenceRope) -> dict[str, ReferenceRope]:
    """Other rotations than this one, each by one mistake."""
    other: Literal["halves", "neighbours"] = "halves" if rope.pairs == "neighbours" else "neighbours"
    found = {
        "RoPE base is 10000, not the config's": replace(rope, theta=10000.0),
        "RoPE scaling is off": ReferenceRope(rope.theta),
        f"RoPE rotates {other}, not {rope.pairs}": replace(rope, pairs=other),
    }
    if rope.kind == "yarn":
        own, flipped = rope.parameters, 0.0 if rope.parameters.get("truncate", 1) else 1.0
        found[f"YaRN's truncate is {bool(flipped)}"] = replace(rope, parameters={**own, "truncate": flipped})
        found["YaRN's factor on cos and sin is missing"] = replace(rope, parameters={**own, "attention_factor": 1.0})
    return found


def of_layers(layer: Layer) -> dict[str, Fields]:
    """What a layer's fields would be after each mistake."""
    found: dict[str, Fields] = {said: {"rope": rope} for said, rope in of_ropes(layer.rope).items()}
    found |= _of_gates(layer) | _of_heads(layer) | _of_norms(layer)
    found |= {
        "a row does not see its own key (mask -1)": {"sees": -1},
        "a row sees the next key (mask +1)": {"sees": 1},
        "positions are one too high": {"shift": 1},
        "positions are one too low": {"shift": -1},
    }
    if layer.window:
        found["the window is off"] = {"window": 0}
        found["the window is one key longer"] = {"window": layer.window + 1}
        found["the window is one key shorter"] = {"window": layer.window - 1}
    if layer.sinks is not None:
        found["attention sinks are off"] = {"sinks": None}
    if layer.scale:
        found["attention is scaled by head_dim"] = {"scale": 0.0}
    kinds = {"q, k and v": "qkv", "o": "o", "the router": ("router",), "gate and up": ("gate", "up"), "down": ("down",)}
    for which, names in (kinds | {"every linear": tuple(layer.biases)}).items():
        if set(names) & set(layer.biases):
            left = {name: bias for name, bias in layer.biases.items() if name not in names}
            found[f"biases of {which} are off"] = {"biases": left}
    if layer.router is not None:
        said = "chosen experts, not all" if layer.over_all else "all experts, not the chosen"
        found[f"the router takes the softmax over {said}"] = {"over_all": not layer.over_all}
    return found


def _of_gates(layer: Layer) -> dict[str, Fields]:
    """Gate and up swapped, or their rows read as halves where they alternate and the other way round."""
    swapped = {**layer.biases, **{a: layer.biases[b] for a, b in (("gate", "up"), ("up", "gate")) if b in layer.biases}}
    found: dict[str, Fields] = {
        "gate and up are swapped": {"gate": layer.up, "up": layer.gate, "biases": swapped}
    }  # fmt: skip
    for said, order in (("halves of rows that alternate", 0), ("alternating rows of halves", 1)):
        weights = _regrouped(layer.gate, layer.up, order, -2)
        biases = dict(layer.biases)
        if "gate" in biases:
            biases |= zip(("gate", "up"), _regrouped(biases["gate"], biases["up"], order, -1), strict=True)
        found[f"gate and up are read as {said}"] = {"gate": weights[0], "up": weights[1], "biases": biases}
    return found


def _regrouped(gate: Array, up: Array, order: int, axis: int) -> tuple[Array, Array]:
    """Gate and up as read from rows that alternate (0), or stand in halves (1), by whoever expects the other."""
    joined, places = np.concatenate((gate, up), axis), np.arange(2 * gate.shape[axis])
    read = (places[::2], places[1::2]) if order else np.split(places.reshape(2, -1).T.ravel(), 2)
    return np.take(joined, read[0], axis), np.take(joined, read[1], axis)


def _of_heads(layer: Layer) -> dict[str, Fields]:
    """Matrices whose rows stand [Dh, heads] where [heads, Dh] is meant; of o, its columns."""
    counts = {"q": layer.num_heads, "k": layer.num_kv_heads, "v": layer.num_kv_heads}
    turned = {name: transposed(getattr(layer, name), count) for name, count in counts.items()}
    found: dict[str, Fields] = {f"heads of {name} are transposed": {name: matrix} for name, matrix in turned.items()}
    found["heads of o are transposed"] = {"o": transposed(layer.o.T, layer.num_heads).T}
    return found | {"heads of q, k and v are transposed": dict(turned)}


def transposed(matrix: Array, num_heads: int) -> Array:
    """Rows [heads * Dh, In] in the order of [Dh, heads]."""
    return matrix.reshape(num_heads, -1, matrix.shape[1]).swapaxes(0, 1).reshape(matrix.shape)


def _of_norms(layer: Layer) -> dict[str, Fields]:
    """Norms that are missing, and weights that are taken as they are where 1 belongs to them or the other way round."""
    names = {
        "before attention": ("input_norm",), "before the MLP": ("post_norm",), "of q": ("q_norm",), "of k": ("k_norm",),
        "of q and k": ("q_norm", "k_norm"),
        "after attention": ("attention_out_norm",), "after the MLP": ("mlp_out_norm",),
    }  # fmt: skip
    found: dict[str, Fields] = {}
    for where, fields in names.items():
        own = {name: getattr(layer, name) for name in fields}
        if any(weight is None for weight in own.values()):
            continue
        found[f"the norm {where} is missing"] = dict.fromkeys(own)
        found[f"the norm {where} adds 1 to its weight"] = {name: weight + 1 for name, weight in own.items()}
        found[f"the norm {where} lacks the 1 of its weight"] = {name: weight - 1 for name, weight in own.items()}
    return found


def of_drafts(draft: ReferenceDraft, num_layers: int) -> dict[str, Fields]:
    """What a draft's fields would be after each mistake."""
    found: dict[str, Fields] = {}
    for by in (-1, 1):
        capture = tuple(layer + by for layer in draft.capture)
        if all(0 <= layer < num_layers for layer in capture):
            found[f"captured layers are {by:+d}: {capture} instead of {draft.capture}"] = {"capture": capture}
    found["captured layers are joined in the opposite order"] = {"capture": draft.capture[::-1]}
    for name in ("input_norm", "fc_norm", "hidden_norm", "norm"):
        if getattr(draft, name) is not None:
            found[f"{name} is missing"] = {name: None}
    if draft.input_norm is None:
        found["features are normed before fc"] = {"input_norm": np.ones(draft.fc.shape[1], np.float32)}
    said = "raw" if draft.norm_before_residual else "normed"
    found[f"the residual is the {said} feature"] = {"norm_before_residual": not draft.norm_before_residual}
    said = "raw" if draft.norm_feedback else "normed"
    found[f"the {said} output is fed back"] = {"norm_feedback": not draft.norm_feedback}
    own = np.arange(len(draft.ids))
    if (draft.ids != own).any():
        found["d2t is read as ids, not offsets"] = {"ids": draft.ids - own}
        found["d2t is negated"] = {"ids": 2 * own - draft.ids}
        found["d2t is ignored"] = {"ids": own}
    found |= {said: {"layer": replace(draft.layer, **fields)} for said, fields in of_layers(draft.layer).items()}
    return found


def diagnose_draft(
    found: list[StageFigures], ours: StageRecord, run: DraftRun, layers: Array, tolerance: Tolerance
) -> Diagnosis:
    """The draft's first bad stage and what explains it. found: the draft's stages as compared; layers: as DraftRun."""
    rows = ours.rows("draft.")

    def again(draft: ReferenceDraft) -> StageRecord:
        return DraftRun(draft, run.tokens, layers).record(ours, rows)

    mistakes = of_drafts(run.draft, layers.shape[1])
    tries = ((said, again(replace(run.draft, **fields))) for said, fields in mistakes.items())
    return _explained(found, ours, tries, tolerance)


def diagnose_target(
    found: list[StageFigures], ours: StageRecord, target: TransformersTarget, tolerance: Tolerance
) -> Diagnosis:
    """The target's first bad stage and what explains it, where that is a layer or the logits. Only the layer is run
    again, over what transformers gives it: a mistake in all layers shows in the first."""
    bad = first_bad(found)
    text = target.text_of(bad.first_bad)
    *inputs, _ = target.values(text)
    rows = [row for row in bad.rows if row.tokens == text[: len(row.tokens)]]
    at = [row.position for row in rows]

    def record(values: Array) -> StageRecord:
        again = StageRecord(ours.prompt)
        again.add(bad.stage, rows, values[at])
        return again

    def tries() -> Iterator[tuple[str, StageRecord]]:
        name, _, number = bad.stage.removeprefix("target.").partition(".")
        if name == "layers":
            layer, x = target.layer(int(number)), inputs[int(number)]
            for said, fields in of_layers(layer).items():
                yield said, record(replace(layer, **fields).forward(x))
            if number == "0":
                root = np.float32(x.shape[1] ** 0.5)
                yield "embeddings are not scaled", record(layer.forward(x / root))
                yield "embeddings are scaled", record(layer.forward(x * root))
        elif name == "logits":
            norm, head = target.final_norm()
            eps = target.config.rms_norm_eps
            yield "the final norm is missing", record(inputs[-1] @ head.T)
            for by in (-1, 1):
                yield f"the final norm's weight is {by:+d}", record(normed(inputs[-1], norm + by, eps) @ head.T)

    return _explained(found, ours, tries(), tolerance)


def first_bad(found: Iterable[StageFigures]) -> StageFigures:
    """The first stage of a model that is not good. A draft's nodes begin with what their parents gave: where rows of
    less depth differ, those stages come first."""

    def order(each: StageFigures) -> tuple[object, ...]:
        return each.first_bad.depth if each.stage.startswith("draft.") else 0, order_of(each.stage)

    return min((each for each in found if not each.is_good), key=order)


def _explained(
    found: list[StageFigures], ours: StageRecord, tries: Iterable[tuple[str, StageRecord]], tolerance: Tolerance
) -> Diagnosis:
    """The first bad stage, and the hypotheses under which it agrees; the first is the one under which all stages
    together agree best."""
    bad = first_bad(found)
    model = bad.stage.partition(".")[0]
    phase, causes = ours.phase(bad.first_bad), list[tuple[float, str]]()
    part = StageRecord(ours.prompt)
    part.stages[bad.stage] = {row: v for row, v in ours.stages[bad.stage].items() if ours.phase(row) == phase}
    difference = _difference(bad)
    with np.errstate(all="ignore"):  # a mistake may overflow
        for name, record in tries:
            [own] = compare(part, record, {model: tolerance})
            if own.share_good >= MOST and _difference(own) <= CLEAR * difference:
                whole = compare(ours, record, {model: tolerance})
                causes.append((float(np.mean([_difference(each) for each in whole])), name))
    causes.sort(key=lambda each: each[0])
    best = tuple(name for left, name in causes if left <= 1.05 * causes[0][0])
    return finding_of(bad, ours, best)


def finding_of(bad: StageFigures, ours: StageRecord, causes: tuple[str, ...] | None = None) -> Diagnosis:
    """A bad stage at its first bad row."""
    return Diagnosis(bad.stage, bad.first_bad.position, ours.phase(bad.first_bad), causes)


def _difference(figures: StageFigures) -> float:
    """Of a stage: its rows' relative difference, of drafted tokens the share that are not among the reference's."""
    is_tokens = figures.stage == "draft.tokens"
    return float(np.mean(1 - figures.figures.top5 if is_tokens else figures.figures.relative))

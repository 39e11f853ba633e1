"""One comparison from settings to verdict: observe a pair, run or read the reference, compare, and explain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from aquiline.blocks import floats_of
from aquiline.config import check
from aquiline.engine.model import LoadedModels, ResolvedPair, from_weights
from aquiline.models.files import is_gguf
from aquiline.models.load import read_target
from aquiline.models.model_weights import ModelWeights
from aquiline.ops.quantise import QUANTISED, quantise
from aquiline.parity.diagnose import Diagnosis, diagnose_draft, diagnose_target, finding_of, first_bad
from aquiline.parity.draft_run import DraftRun
from aquiline.parity.observe import MOST_WRITTEN, lens_of, observe_draft, observe_target
from aquiline.parity.parity_choice import DUMP, MIN_LENGTH, ParityChoice
from aquiline.parity.record import StageRecord, load, order_of, save
from aquiline.parity.reference_draft import Array, ReferenceDraft
from aquiline.parity.reference_files import read_reference
from aquiline.parity.stage_figures import StageFigures, Tolerance, compare, tolerance_of
from aquiline.types import storage_dtype

TEXT = """The tide comes in twice a day, and twice it goes out again. A child who watches it for the first time asks
where all of the water went, and nobody on the beach can say.

def total(prices, rate=0.2):
    return sum(price * (1 + rate) for price in prices)

"""

Explain = Callable[[list[StageFigures]], Diagnosis]


@dataclass(frozen=True, eq=False)
class Observed:
    """A run of a pair. storages and tolerances: by model, target and draft; system: what ran; target: its weights."""

    record: StageRecord
    storages: dict[str, str]
    tolerances: dict[str, Tolerance]
    system: dict[str, object]
    target: ModelWeights


@dataclass(frozen=True, eq=False)
class Parity:
    """A comparison's outcome. findings: one for each model whose stages differ; unseen: by stage, why it was not
    compared, or not at all rows."""

    stages: list[StageFigures]
    findings: list[Diagnosis]
    unseen: dict[str, str]
    seen: Observed

    @property
    def is_good(self) -> bool:
        """Whether every stage that was compared is within its tolerance."""
        return not self.findings


def check_installed(target: Path) -> None:
    """Raises ValueError if transformers cannot load this target here."""
    names = ("torch", "transformers", *(["accelerate"] if is_gguf(target) else []))
    for name in names:
        try:
            import_module(name)
        except ImportError:
            raise ValueError(
                f"reference='transformers': {name} is not installed, and {target.name} needs it: pip install "
                f"{' '.join(names)}, or compare the draft alone with --reference eager"
            ) from None


def check_fits(prompt: Sequence[int], stages: Sequence[str], models: LoadedModels) -> None:
    """Raises ValueError for a prompt that this target cannot read, or is not built to go on from, and for layers that
    it does not have."""
    for name in stages:
        number, last = name.rpartition(".")[2], models.target_config.num_layers - 1
        check(not number.isdigit() or int(number) <= last, "stages", name, f"the target's last layer is layers.{last}")
    ok = len(prompt) >= MIN_LENGTH and all(0 <= token < models.vocab_size for token in prompt)
    check(ok, "prompt", list(prompt), f"must be {MIN_LENGTH} or more tokens, each below {models.vocab_size}")
    most = models.max_positions - MOST_WRITTEN
    check(
        len(prompt) <= most, "length", len(prompt), f"the target has {models.max_positions} positions: at most {most}"
    )


def observe(resolved: ResolvedPair, prompt: Sequence[int], models: LoadedModels | None = None) -> Observed:
    """Run a pair over a prompt and record its stages: the draft with the target as it serves, then the target alone
    with all layers captured, over the same trees. models: the pair as it is loaded already."""
    models = models or resolved.load()
    record, trees = StageRecord(tuple(prompt)), []
    if models.draft_config is not None:
        trees = observe_draft(models.pair, prompt, record)
    every = tuple(range(models.target_config.num_layers))
    target = read_target(resolved.target, dtype=resolved.how.dtype, capture=every)
    how = replace(resolved.how, draft_dtype="float32")
    alone = from_weights(target, lens_of(target.config), None, how, resolved.environment)
    observe_target(alone.pair, prompt, record, trees)
    storages = {"target": resolved.how.dtype}
    if models.draft_storage is not None:
        storages["draft"] = models.draft_storage
    tolerances = {
        model: tolerance_of(storage, models.arithmetic, model == "target" and target.config.experts is not None)
        for model, storage in storages.items()
    }
    return Observed(record, storages, tolerances, models.system(), target)


def prompt_of(models: LoadedModels, choice: ParityChoice) -> list[int]:
    """The prompt's tokens; of a target without a tokenizer, tokens at random."""
    if models.tokenizer is None:
        check(choice.prompt is None, "prompt", choice.prompt, "the target has no tokenizer; leave the prompt out")
        return [int(i) for i in np.random.default_rng(0).integers(1, models.vocab_size, choice.length)]
    text = choice.prompt or TEXT
    ids: list[int] = models.tokenizer.encode(text).ids
    check(bool(ids), "prompt", text, "has no token; give another text")
    return (ids * -(-choice.length // len(ids)))[: choice.length]


def compare_pair(resolved: ResolvedPair, choice: ParityChoice) -> Parity:
    """Compare a pair with the reference that was chosen.

    Raises ValueError for a reference that this pair or this machine does not have."""
    if choice.reference == "eager" and resolved.draft is None:
        raise ValueError("reference='eager': there is no draft to compare; name one with --draft, or use transformers")
    if choice.compares("target", "transformers"):
        check_installed(resolved.target)
    theirs = load(Path(choice.reference.removeprefix(DUMP))) if choice.reference.startswith(DUMP) else None
    models = resolved.load()
    prompt = prompt_of(models, choice) if theirs is None else theirs.prompt
    check_fits(prompt, choice.stages, models)
    seen = observe(resolved, prompt, models)
    if choice.dump is not None:
        save(seen.record, choice.dump)
    found = beside_references(seen, resolved, choice) if theirs is None else beside(seen, theirs, choice, {})
    if not found.stages:
        raise ValueError(
            f"stages={' '.join(choice.stages) or 'all'}, reference={choice.reference!r}: this run and the reference "
            f"have none of them in common; this run has {', '.join(sorted(seen.record.stages, key=order_of))}"
        )
    return found


def beside_references(seen: Observed, resolved: ResolvedPair, choice: ParityChoice) -> Parity:
    """What was seen of a pair, beside the references of these checkpoints; what differs is explained."""
    ours, theirs, explain = seen.record, StageRecord(seen.record.prompt), dict[str, Explain]()
    if choice.compares("target", "transformers"):
        from aquiline.parity.transformers_target import TransformersTarget

        target = TransformersTarget(resolved.target, seen.storages["target"])
        theirs.stages |= target.record(ours.prompt, ours.rows("target.")).stages
        explain["target"] = lambda bad: diagnose_target(bad, ours, target, seen.tolerances["target"])
    if choice.compares("draft", "eager") and resolved.draft is not None:
        layers = layers_of(ours)
        run = DraftRun(_draft_reference(resolved, seen), ours.text, layers)
        theirs.stages |= run.record(ours, ours.rows("draft.")).stages
        explain["draft"] = lambda bad: diagnose_draft(bad, ours, run, layers, seen.tolerances["draft"])
    return beside(seen, theirs, choice, explain)


def beside(seen: Observed, theirs: StageRecord, choice: ParityChoice, explain: Mapping[str, Explain]) -> Parity:
    """What was seen of a pair, beside a record. explain: by model, what says why its stages differ; a dump's engine
    cannot be run again, so nothing does."""
    ours, findings = seen.record.only(choice.stages), []
    stages = compare(ours, theirs, seen.tolerances)
    for model in seen.tolerances:
        own = [each for each in stages if each.stage.startswith(f"{model}.")]
        if not all(each.is_good for each in own):
            findings.append(explain[model](own) if model in explain else finding_of(first_bad(own), ours))
    return Parity(stages, findings, _unseen(ours, theirs), seen)


def _unseen(ours: StageRecord, theirs: StageRecord) -> dict[str, str]:
    """Why stages of the models that are compared were not, or not at all rows."""
    missing = {name: "the reference does not have it" for name in ours.stages if name not in theirs.stages}
    models = {name.partition(".")[0] for name in theirs.stages}
    return {name: why for name, why in {**ours.unseen, **missing}.items() if name.partition(".")[0] in models}


def _draft_reference(resolved: ResolvedPair, seen: Observed) -> ReferenceDraft:
    """The reference draft, its linears rounded to the values of codes where the draft that was seen is in codes."""
    assert resolved.draft is not None
    overrides, target, dtype = resolved.asked.overrides, seen.target, seen.storages["draft"]
    embed, head = (floats_of(each).astype(np.float32) for each in (target.embed, target.head))
    draft = read_reference(
        resolved.draft, target.config.num_layers, embed, head, overrides.capture, overrides.norm_feedback
    )
    if dtype not in QUANTISED:
        return draft
    layer = replace(draft.layer, **_rounded(draft.layer, ("q", "k", "v", "o", "gate", "up", "down"), dtype))
    return replace(draft, layer=layer, **_rounded(draft, ("fc", "head"), dtype))


def _rounded(owner: object, names: Sequence[str], dtype: str) -> dict[str, Any]:
    """The values that codes of these matrices stand for, by name."""
    stored = {name: getattr(owner, name).astype(storage_dtype(dtype)) for name in names}
    return {name: quantise(name, weight, dtype).dequantised() for name, weight in stored.items()}


def layers_of(record: StageRecord) -> Array:
    """[n - 1, L, H]: what every target layer gave at all tokens of the text but the last."""
    by_tokens = [
        {row.tokens: values for row, values in record.stages[stage].items()}
        for stage in sorted(record.stages, key=order_of) if stage.startswith("target.layers.")
    ]  # fmt: skip
    return np.stack([[layer[record.text[: i + 1]] for layer in by_tokens] for i in range(len(record.text) - 1)])

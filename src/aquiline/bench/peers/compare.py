"""aquiline against its peers: the same weights, prompts and token counts, every setting in turn, one verdict.

A comparison with an engine that computes another model says nothing. So before anything is timed, every kind of peer
continues a few prompts, and its tokens must be ours on every prompt (`check`); otherwise the kind is void. The tokens
of the timed settings are compared with ours and reported too, but they may differ: in bfloat16 a near tie may fall
either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.peers.base import QUANTISED, PeerSpec, Place
from aquiline.bench.peers.check import CHECK_NEEDED, CHECK_PROMPTS, Checked, check
from aquiline.bench.peers.contestants import Other, Own
from aquiline.bench.peers.converted import stored_dtype
from aquiline.bench.peers.names import ALL_PEERS, PACKED_PEERS, parse_peers
from aquiline.bench.peers.plan import Contest, Workload
from aquiline.bench.peers.random_target import random_target
from aquiline.bench.peers.results import PeerModel, agreement, file_weights
from aquiline.bench.peers.verdict import Comparison, Row
from aquiline.bench.results.integrity import differences
from aquiline.bench.results.intervals import rotated
from aquiline.bench.results.result import Result, Scenario, is_speculative, tokens_sha256
from aquiline.bench.theory.ceilings import ceilings_of
from aquiline.bench.theory.choice import Choice
from aquiline.bench.theory.configs import shape_of
from aquiline.bench.theory.device import GIGA
from aquiline.bench.theory.roofline import Roofline
from aquiline.bench.theory.shapes import precision_of
from aquiline.blocks import PACKED
from aquiline.config import EngineConfig, Environment, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, for_checkpoint
from aquiline.errors import AquilineError
from aquiline.metrics import mean
from aquiline.models.files import is_gguf
from aquiline.models.load import resolve, target_entries
from aquiline.models.named import BUNDLED_TARGET, checkpoints, draft_of
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

SETTLE_S = 0.1
"""Pause before each run: the threads of the engine that ran before keep spinning on the cores for a while."""


@dataclass(frozen=True)
class Plan(Workload):
    """What is compared. names: target and draft as a stranger would know them; is_packed: whether the target is a GGUF
    file that we run as it is."""

    target: Path
    draft: Path | None
    peers: tuple[PeerSpec, ...]
    names: tuple[str, str | None]
    is_random: bool = False
    is_packed: bool = False
    arithmetics: tuple[str, ...] = ("float32",)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.arithmetics[:1] != ("float32",):
            raise ValueError(f"arithmetics={self.arithmetics}: float32 comes first; peers are checked against it")


def plan_of(contest: Contest, pair: PairConfig, work: Workload) -> Plan:
    """The plan of what a user names. Without peers, all that can run what is compared.

    Raises ValueError for a target beside random weights, for an unknown peer, and for one that needs another target."""
    is_random, target, draft = contest.random_weights is not None, pair.target, pair.draft
    if is_random and (target or draft):
        raise ValueError(
            f"random_weights={contest.random_weights!r}: is a target of its own; leave --target and --draft out"
        )
    drafts: Path | None
    if contest.random_weights is not None:
        place, drafts = random_target(contest.random_weights), None
        names: tuple[str, str | None] = (f"random weights, {Path(contest.random_weights).name}", None)
    else:
        pair_named = checkpoints(target, draft)
        place, names = resolve(pair_named.target), pair_named.names
        drafts = None if pair_named.draft is None else resolve(draft_of(pair_named.draft))
    is_packed = is_gguf(place) and for_checkpoint(Loading(), place, Environment.read()).dtype == PACKED
    everybody = (*ALL_PEERS, *(PACKED_PEERS if is_packed else ()))
    named = parse_peers(contest.peer or everybody, work.num_spec_tokens)
    for spec in named:
        spec.check_target(place)
    if not contest.peer and drafts is None:
        named = tuple(spec for spec in named if spec.eagle is None)
    if not contest.peer and work.batch > 1:
        named = tuple(s for s in named if not s.is_served and (s.kind == "openvino" or not s.is_speculative))
    arithmetics = ("float32", "bfloat16") if contest.bf16_arithmetic else ("float32",)
    return Plan(place, drafts, named, names, is_random, is_packed, arithmetics, **vars(work))


def compare(plan: Plan, on_progress: Callable[[str], None] = lambda what: None) -> Comparison:
    """Run a plan. on_progress is called with the name of each stage as it begins.

    Raises ValueError if no peer can be opened, or if one fails later."""
    max_context = plan.prompt_tokens + plan.new_tokens
    config = EngineConfig(
        max_batch=plan.batch, prefix_cache=False, max_context=max_context + 16,
        # All prompts of a run are computed in one step, as every peer does; so decoding is timed without prefill.
        row_budget=max(EngineConfig().row_budget, plan.batch * plan.prompt_tokens),
    )  # fmt: skip
    llms = {}
    for name, (dtype, arithmetic) in _storages(plan).items():
        on_progress(f"loading aquiline, {dtype} weights, {arithmetic} arithmetic")
        llms[name] = LLM(plan.target, plan.draft, dtype=dtype, arithmetic=arithmetic, engine=config)
    llm = next(iter(llms.values()))
    prompts, scenario = _prompts(plan, llm)
    place = Place(plan.target, plan.draft, int(str(llm.models.system()["threads"])), max_context + 1, plan.batch)
    others, absent = _open(plan, place, prompts[-1], on_progress)
    alone = [ids for ids, _ in _token_ids(plan, llm, CHECK_PROMPTS)]
    try:
        checks, references = dict[str, Checked](), dict(llms)
        for spec in {other.spec.model: other.spec for other in others if other.spec.kind != "openai"}.values():
            on_progress(f"checking {spec.model}")
            exact = str(spec.plain.dtype)
            if exact not in references:
                references[exact] = LLM(plan.target, dtype="float32", engine=config)
            checks[spec.model] = check(references[exact], spec, place, alone)
        own = list(_own(plan, llms))
        for ours in own:
            on_progress(f"warming up {ours.label}")
            ours.run(prompts[-1], _sampling(plan, 0))
            ours.runs.clear()
        settings: list[Own | Other] = [*own, *others]
        _measure(plan, settings, prompts[:-1], on_progress)
        results = [setting.result(scenario, _model(plan, llm)) for setting in settings]
        rows = _rows(plan, settings, results, checks, llm.models.tokenizer)
        for row, result in zip(rows, results, strict=True):
            result["void"] = row.void
        on_progress("this machine's bandwidth")
        moved = {row.label: _moved(plan, ours.llm, row) for ours, row in zip(own, rows, strict=False) if ours.is_plain}
        return Comparison(rows, results, checks, absent, llm.models.system(), moved)
    finally:
        for other in others:
            other.peer.close()


def _storages(plan: Plan) -> dict[str, tuple[str, str]]:
    """The storages that we run, as dtype and arithmetic by name. The first is the baseline's: a GGUF file as it is, or
    what holds a checkpoint without rounding. The rounded ones run if a peer runs them too."""
    stored = stored_dtype(plan.target)
    first = {PACKED: (PACKED, "auto")} if plan.is_packed else {"float32": (stored, "float32")}
    more = {name: ("bfloat16", name) for name in plan.arithmetics[1:]}
    return first | more | {name: (name, "auto") for name in QUANTISED if any(s.dtype == name for s in plan.peers)}


def _moved(plan: Plan, llm: LLM, row: Row) -> tuple[float, float]:
    """Two bandwidths in GB/s: that of a plain setting, if each step reads every weight and all keys so far, and that of
    plain reads."""
    models = llm.models
    ceilings = ceilings_of(Choice(arithmetic=models.arithmetic), models.storage, lambda stage: None)
    roofline = Roofline(
        shape_of(models.target_config, models.storage), None, precision_of(models.storage, None), ceilings
    )
    step = roofline.step(plan.batch, plan.prompt_tokens + plan.new_tokens // 2)
    return step.cost.num_bytes * row.rate.value / plan.batch / GIGA, ceilings.bandwidth.value / GIGA


def _open(
    plan: Plan, place: Place, warm: list[list[int]], on_progress: Callable[[str], None]
) -> tuple[list[Other], dict[str, str]]:
    """The peers that can run, warmed up; and for the others, by label, the reason why they cannot."""
    others, absent = [], {}
    for spec in plan.peers:
        on_progress(f"loading {spec.label}")
        try:
            other = Other(spec, spec.open(place))
            other.run(warm, _sampling(plan, 0))
        except (ValueError, AquilineError, RuntimeError) as error:  # RuntimeError is what native code raises
            absent[spec.label] = " ".join(str(error).split())
            continue
        other.runs.clear()
        others.append(other)
    if not others:
        raise ValueError("no peer can run: " + "; ".join(dict.fromkeys(absent.values())))
    return others, absent


def _sampling(plan: Plan, index: int) -> list[SamplingParams]:
    """How the prompts of run number `index` are sampled."""
    first = plan.seed + index * plan.batch
    return [
        SamplingParams(max_tokens=plan.new_tokens, temperature=plan.temperature, seed=seed, ignore_eos=True)
        for seed in range(first, first + plan.batch)
    ]


def _own(plan: Plan, llms: dict[str, LLM]) -> Iterator[Own]:
    specs: dict[str, Drafting] = {"baseline": NoDraft()}
    if plan.draft is not None:
        specs |= {f"chain-{k}": Chain(k) for k in plan.num_spec_tokens}
        specs["tree"] = Dynamic()
    for number, (kind, llm) in enumerate(llms.items()):
        suffix = f" in {kind}" if number else ""
        for name, spec in specs.items():
            yield Own(f"{name}{suffix}", llm, spec)


def _prompts(plan: Plan, llm: LLM) -> tuple[list[list[list[int]]], Scenario]:
    """The prompts of each measured run and, at the end, those of the run that warms up. No engine has seen a measured
    prompt before."""
    found = _token_ids(plan, llm, (plan.repeats + 1) * plan.batch)
    prompts, held_out = [ids for ids, _ in found], all(is_held_out for _, is_held_out in found)
    source = f"{plan.text_source or 'standard library'}{', held out' if held_out else ', partly trained on'}"
    groups = [prompts[i : i + plan.batch] for i in range(0, len(prompts), plan.batch)]
    return groups, Scenario(
        name="peers", profile="cpu", context_tokens=plan.prompt_tokens, batch=plan.batch, new_tokens=plan.new_tokens,
        temperature=plan.temperature, seed=plan.seed, prompts_sha256=tokens_sha256(prompts[: -plan.batch]),
        prompts_source=source, warmup_runs=1, measurement_runs=plan.repeats,
    )  # fmt: skip


def _token_ids(plan: Plan, llm: LLM, count: int) -> list[tuple[list[int], bool]]:
    """`count` prompts, each with whether the bundled pair's training has not seen it. A smaller count gives the first
    prompts of a larger one."""
    tokenizer = llm.models.tokenizer or Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    found = text_prompts(plan.prompt_tokens, count, tokenizer, plan.text_source)
    return [([token % llm.models.vocab_size for token in p.token_ids], p.is_held_out) for p in found]


def _measure(
    plan: Plan, settings: list[Own | Other], prompts: list[list[list[int]]], on_progress: Callable[[str], None]
) -> None:
    """Run every setting on the prompts of every round; each round begins with another setting."""
    for index, group in enumerate(prompts):
        for setting in rotated(settings, index):
            on_progress(f"run {index + 1} of {len(prompts)}: {setting.label}")
            time.sleep(SETTLE_S)
            try:
                setting.run(group, _sampling(plan, index))
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{setting.label}: failed in run {index + 1} of {len(prompts)}: {error}") from error


def _model(plan: Plan, llm: LLM) -> PeerModel:
    config = llm.models.target_config
    sizes = [entry.shape for entry in target_entries(config)]
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes)
    file = file_weights(plan.target) if is_gguf(plan.target) else None
    return PeerModel(*plan.names, config, count, plan.is_random, file)


def _rows(
    plan: Plan,
    settings: list[Own | Other],
    results: list[Result],
    checks: dict[str, Checked],
    tokenizer: Tokenizer | None,
) -> list[Row]:
    expected = [text.token_ids for text in settings[0].texts]
    rows = []
    for setting, result in zip(settings, results, strict=True):
        counts = [agreement(text, ids, tokenizer) for text, ids in zip(setting.texts, expected, strict=True)]
        # At a temperature only our own settings can agree: other engines draw with other noise.
        is_known = plan.temperature == 0 or isinstance(setting, Own)
        agreed = [float(count) for count in counts if count is not None and is_known]
        rows.append(
            Row(
                label=setting.label, engine=result["engine"], weights=result["model"]["dtype"],
                arithmetic=result["model"]["arithmetic"], is_speculative=is_speculative(result),
                tokens_per_s=result["throughput_tokens_per_sec"]["values"], ttft_ms=result["ttft_ms"]["median"],
                tau=result["eagle_speculation"]["mean_acceptance_length"], agreed=mean(agreed) if agreed else None,
                void=_void(setting, result, results[0], checks, agreed),
            )
        )  # fmt: skip
    return rows


def _void(
    setting: Own | Other, result: Result, baseline: Result, checks: dict[str, Checked], agreed: list[float]
) -> str:
    """Why a setting may not be compared; empty if it may."""
    if isinstance(setting, Own):
        alike = all(result["model"][name] == baseline["model"][name] for name in ("dtype", "arithmetic"))
        return "; ".join(differences(result, baseline)) if alike else ""
    reasons = differences(result, baseline)
    if setting.spec.kind == "openai":  # the machine that a server runs on is not known here
        reasons = [reason for reason in reasons if not reason.startswith("system.")]
        if agreed and min(agreed) < min(CHECK_NEEDED, result["scenario"]["new_tokens"]):
            reasons.append(f"its text is not ours: on one prompt {min(agreed):.0f} tokens agree")
    else:
        reasons += checks[setting.spec.model].problems
    return "; ".join(reasons)

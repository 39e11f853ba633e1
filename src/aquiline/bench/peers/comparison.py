"""aquiline against its peers: the same weights, prompts and token counts, every setting in turn, one verdict.

A comparison with an engine that computes another model says nothing. So before anything is timed, every kind of peer
continues a few prompts, and its tokens must be ours on every prompt (`check`); otherwise the kind is void. The tokens
of the timed settings are compared with ours and reported too, but they may differ: in bfloat16 a near tie may fall
either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.data.prompts import text_prompts
from aquiline.bench.peers.check import CHECK_NEEDED, CHECK_PROMPTS, Checked, check
from aquiline.bench.peers.contest import Contest, Workload
from aquiline.bench.peers.contestants import Other, Own, PeerModel, agreement, file_weights
from aquiline.bench.peers.names import ALL_PEERS, PACKED_PEERS, QUANTISED, PeerSpec, parse_peers
from aquiline.bench.peers.peer import PeerSetup, conversion, stored_dtype
from aquiline.bench.peers.verdict import Comparison, Standing, standing_of
from aquiline.bench.results.integrity import differences
from aquiline.bench.results.intervals import rotated
from aquiline.bench.results.result import Result, Scenario, tokens_sha256
from aquiline.bench.theory.ceilings import ceilings_of
from aquiline.bench.theory.choice import LimitsChoice
from aquiline.bench.theory.device import GIGA
from aquiline.bench.theory.roofline import Roofline
from aquiline.blocks import PACKED
from aquiline.config import EngineConfig, Environment, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, for_checkpoint
from aquiline.errors import AquilineError
from aquiline.metrics import mean
from aquiline.models.counting import shape_of
from aquiline.models.files import is_gguf
from aquiline.models.known_pairs import BUNDLED_TARGET, checkpoints, draft_of
from aquiline.models.load import resolve, target_entries
from aquiline.models.shape import precision_of
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

SETTLE_S = 0.1
"""Pause before each run: the threads of the engine that ran before keep spinning on the cores for a while."""
SPARE_TOKENS = 16
"""Our context beyond prompt and output."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ContestPlan(Workload):
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

    @property
    def title(self) -> str:
        """What is continued, in words."""
        prompts = f"{self.repeats} x {self.batch} prompts of {self.prompt_tokens} tokens"
        return f"{self.names[0]}: {prompts}, {self.new_tokens} new"


def plan_of(contest: Contest, pair: PairConfig, work: Workload) -> ContestPlan:
    """The plan of a contest. Without peers, all that can run the target.

    Raises ValueError for a target beside random weights, for an unknown peer, and for one that needs another target."""
    draft: Path | None = None
    names: tuple[str, str | None]
    if contest.random_weights is not None:
        asked = f"random_weights={contest.random_weights!r}"
        if pair.target or pair.draft:
            raise ValueError(f"{asked}: is a target of its own; leave --target and --draft out")
        target: Path = conversion("random_target", asked).random_target(contest.random_weights)
        names = (f"random weights, {Path(contest.random_weights).name}", None)
    else:
        named = checkpoints(pair.target, pair.draft)
        target, names = resolve(named.target), named.names
        draft = None if named.draft is None else resolve(draft_of(named.draft))
    is_packed = is_gguf(target) and for_checkpoint(Loading(), target, Environment.read()).dtype == PACKED
    peers = parse_peers(
        contest.peer or (*ALL_PEERS, *(PACKED_PEERS if is_packed else ())), work.num_spec_tokens
    )  # fmt: skip
    for spec in peers:
        spec.check_target(target)
    if not contest.peer:
        peers = tuple(spec for spec in peers if _can_run(spec, draft is not None, work.batch))
    arithmetics = ("float32", "bfloat16") if contest.bf16_arithmetic else ("float32",)
    is_random = contest.random_weights is not None
    return ContestPlan(target, draft, peers, names, is_random, is_packed, arithmetics, **vars(work))


def _can_run(spec: PeerSpec, has_draft: bool, batch: int) -> bool:
    """Whether a peer that nobody named can take part."""
    if spec.eagle is not None and not has_draft:
        return False
    return batch == 1 or (not spec.is_served and (spec.kind == "openvino" or not spec.is_speculative))


def compare(plan: ContestPlan, on_progress: Progress = lambda stage: None) -> Comparison:
    """Run a plan. on_progress is called with the name of each stage as it begins.

    Raises ValueError if no peer can be opened, or if one fails later."""
    llms = _load(plan, on_progress)
    llm = next(iter(llms.values()))
    prompts, scenario = _prompts(plan, llm)
    threads, max_context = int(str(llm.models.system()["threads"])), plan.prompt_tokens + plan.new_tokens + 1
    setup = PeerSetup(plan.target, plan.draft, threads, max_context, plan.batch)
    others, absent = _open(plan, setup, prompts[-1], on_progress)
    try:
        checks = _check(plan, setup, others, llms, on_progress)
        own = _own(plan, llms)
        for ours in own:
            on_progress(f"warming up {ours.label}")
            ours.run(prompts[-1], _sampling(plan, 0))
            ours.runs.clear()
        settings: list[Own | Other] = [*own, *others]
        _measure(plan, settings, prompts[:-1], on_progress)
        results = [setting.result(scenario, _model(plan, llm)) for setting in settings]
        rows = _standings(plan, settings, results, checks, llm.models.tokenizer)
        on_progress("this machine's bandwidth")
        moved = {
            row.label: _moved(plan, ours.llm, row)
            for ours, row in zip(own, rows, strict=False)
            if not ours.spec.is_speculative
        }
        return Comparison(rows, results, checks, absent, llm.models.system(), moved)
    finally:
        for other in others:
            other.peer.close()


def _engine(plan: ContestPlan) -> EngineConfig:
    return EngineConfig(
        max_batch=plan.batch, prefix_cache=False, max_context=plan.prompt_tokens + plan.new_tokens + SPARE_TOKENS,
        # All prompts of a run are computed in one step, as every peer does; so decoding is timed without prefill.
        row_budget=max(EngineConfig().row_budget, plan.batch * plan.prompt_tokens),
    )  # fmt: skip


def _load(plan: ContestPlan, on_progress: Progress) -> dict[str, LLM]:
    """Our engines by storage. The first is the baseline: a GGUF file as it is, or a checkpoint without rounding. The
    rounded storages run if a peer runs them too."""
    first = {PACKED: (PACKED, "auto")} if plan.is_packed else {"float32": (stored_dtype(plan.target), "float32")}
    more = {name: ("bfloat16", name) for name in plan.arithmetics[1:]}
    rounded = {name: (name, "auto") for name in QUANTISED if any(spec.dtype == name for spec in plan.peers)}
    llms = {}
    for name, (dtype, arithmetic) in (first | more | rounded).items():
        on_progress(f"loading aquiline, {dtype} weights, {arithmetic} arithmetic")
        llms[name] = LLM(plan.target, plan.draft, dtype=dtype, arithmetic=arithmetic, engine=_engine(plan))
    return llms


def _open(
    plan: ContestPlan, setup: PeerSetup, warm: list[list[int]], on_progress: Progress
) -> tuple[list[Other], dict[str, str]]:
    """The peers that can run, warmed up; and for the others, by label, the reason why they cannot."""
    others, absent = [], {}
    for spec in plan.peers:
        on_progress(f"loading {spec.label}")
        try:
            other = Other(spec, spec.open(setup))
            other.run(warm, _sampling(plan, 0))
        except (ValueError, AquilineError, RuntimeError) as error:  # RuntimeError is what native code raises
            absent[spec.label] = " ".join(str(error).split())
            continue
        other.runs.clear()
        others.append(other)
    if not others:
        raise ValueError("no peer can run: " + "; ".join(dict.fromkeys(absent.values())))
    return others, absent


def _check(
    plan: ContestPlan, setup: PeerSetup, others: list[Other], llms: dict[str, LLM], on_progress: Progress
) -> dict[str, Checked]:
    """The check of every kind of peer that runs here, against our engine on the same weights."""
    references = dict(llms)
    prompts = [ids for ids, _ in _token_ids(plan, next(iter(llms.values())), CHECK_PROMPTS)]
    checks = {}
    for spec in {other.spec.model: other.spec for other in others if other.spec.kind != "openai"}.values():
        on_progress(f"checking {spec.model}")
        exact = str(spec.plain.dtype)
        if exact not in references:
            references[exact] = LLM(plan.target, dtype="float32", engine=_engine(plan))
        checks[spec.model] = check(references[exact], spec, setup, prompts)
    return checks


def _moved(plan: ContestPlan, llm: LLM, row: Standing) -> tuple[float, float]:
    """Two bandwidths in GB/s: that of a plain setting, if each step reads every weight and all keys so far, and that of
    plain reads."""
    models = llm.models
    ceilings = ceilings_of(LimitsChoice(arithmetic=models.arithmetic), models.storage, lambda stage: None)
    shape = shape_of(models.target_config, models.storage)
    roofline = Roofline(shape, None, precision_of(models.storage, None), ceilings)
    step = roofline.step(plan.batch, plan.prompt_tokens + plan.new_tokens // 2)
    return step.cost.num_bytes * row.rate.value / plan.batch / GIGA, ceilings.bandwidth.value / GIGA


def _sampling(plan: ContestPlan, index: int) -> list[SamplingParams]:
    """How the prompts of run number `index` are sampled."""
    first = plan.seed + index * plan.batch
    return [
        SamplingParams(max_tokens=plan.new_tokens, temperature=plan.temperature, seed=seed, ignore_eos=True)
        for seed in range(first, first + plan.batch)
    ]


def _own(plan: ContestPlan, llms: dict[str, LLM]) -> list[Own]:
    specs: dict[str, Drafting] = {"baseline": NoDraft()}
    if plan.draft is not None:
        specs |= {f"chain-{k}": Chain(k) for k in plan.num_spec_tokens}
        specs["tree"] = Dynamic()
    return [
        Own(f"{name} in {storage}" if number else name, llm, spec)
        for number, (storage, llm) in enumerate(llms.items())
        for name, spec in specs.items()
    ]


def _prompts(plan: ContestPlan, llm: LLM) -> tuple[list[list[list[int]]], Scenario]:
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


def _token_ids(plan: ContestPlan, llm: LLM, count: int) -> list[tuple[list[int], bool]]:
    """`count` prompts, each with whether the bundled pair's training has not seen it. A smaller count gives the first
    prompts of a larger one."""
    tokenizer = llm.models.tokenizer or Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    found = text_prompts(plan.prompt_tokens, count, tokenizer, plan.text_source)
    return [([token % llm.models.vocab_size for token in p.token_ids], p.is_held_out) for p in found]


def _measure(
    plan: ContestPlan, settings: list[Own | Other], prompts: list[list[list[int]]], on_progress: Progress
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


def _model(plan: ContestPlan, llm: LLM) -> PeerModel:
    config = llm.models.target_config
    sizes = [entry.shape for entry in target_entries(config)]
    count = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in sizes)
    file = file_weights(plan.target) if is_gguf(plan.target) else None
    return PeerModel(*plan.names, config, count, plan.is_random, file)


def _standings(
    plan: ContestPlan,
    settings: list[Own | Other],
    results: list[Result],
    checks: dict[str, Checked],
    tokenizer: Tokenizer | None,
) -> list[Standing]:
    """How every setting did. Writes into each result why it is void."""
    expected = [text.token_ids for text in settings[0].texts]
    rows = []
    for setting, result in zip(settings, results, strict=True):
        counts = [agreement(text, ids, tokenizer) for text, ids in zip(setting.texts, expected, strict=True)]
        # At a temperature only our own settings can agree: other engines draw with other noise.
        is_known = plan.temperature == 0 or isinstance(setting, Own)
        agreed = [float(count) for count in counts if count is not None and is_known]
        result["void"] = _void(setting, result, results[0], checks, agreed)
        rows.append(standing_of(result, mean(agreed) if agreed else None))
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

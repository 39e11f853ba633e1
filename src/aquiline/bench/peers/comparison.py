"""aquiline against its peers: the same weights, prompts and token counts, every setting in turn, one verdict.

A comparison with an engine that computes another model says nothing. So before anything is timed, every kind of peer
continues a few prompts, and its tokens must be ours on every prompt (`check`); otherwise the kind is void. The tokens
of the timed settings are compared with ours and reported too, but they may differ: in bfloat16 a near tie may fall
either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from aquiline.bench.data.prompts import TokenPrompt, text_prompts
from aquiline.bench.peers.contest import Contest
from aquiline.bench.peers.contestants import Other, Own, PeerModel
from aquiline.bench.peers.names import ALL_PEERS, PACKED_PEERS, QUANTISED, PeerSpec, parse_peers
from aquiline.bench.peers.peer import Peer, PeerOutput, PeerSetup, conversion, stored_dtype
from aquiline.bench.peers.verdict import CHECK_TOKENS, Checked, Comparison, Standing, agreement, standing_of, void
from aquiline.bench.results.intervals import rotated
from aquiline.bench.results.result import Result, Scenario, tokens_sha256
from aquiline.bench.theory.ceilings import GIGA
from aquiline.bench.theory.roofline import roofline_of
from aquiline.blocks import PACKED
from aquiline.config import EngineConfig, Environment, PairConfig, SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import Loading, for_checkpoint
from aquiline.errors import AquilineError
from aquiline.metrics import mean
from aquiline.models.known_pairs import BUNDLED_TARGET, checkpoints, draft_of
from aquiline.models.load import resolve
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

SETTLE_S = 0.1
"""Pause before each run: the threads of the engine that ran before keep spinning on the cores for a while."""
CHECK_PROMPTS = 3
"""Prompts on which every kind of peer is checked."""
SPARE_TOKENS = 16
"""Our context beyond prompt and output."""

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ContestPlan:
    """A contest whose model and peers are known. is_packed: whether the target is a GGUF file that we run as it is."""

    contest: Contest
    model: PeerModel
    peers: tuple[PeerSpec, ...]
    is_packed: bool

    @property
    def title(self) -> str:
        """What is continued, in words."""
        work = self.contest
        prompts = f"{work.repeats} x {work.batch} prompts of {work.prompt_tokens} tokens"
        return f"{self.model.names[0]}: {prompts}, {work.new_tokens} new"


def plan_of(contest: Contest, pair: PairConfig) -> ContestPlan:
    """The plan of a contest. Without peers, all that can run the target.

    Raises ValueError for a target beside random weights, for an unknown peer, and for one that needs another target."""
    model = _model(contest.random_weights, pair)
    is_packed = for_checkpoint(Loading(), model.target, Environment.read()).dtype == PACKED
    everybody = ALL_PEERS + PACKED_PEERS if is_packed else ALL_PEERS
    peers = parse_peers(contest.peer or everybody, contest.num_spec_tokens)
    for spec in peers:
        spec.check_target(model.target)
    if not contest.peer:
        peers = tuple(spec for spec in peers if not spec.obstacle(model.draft is not None, contest.batch))
    return ContestPlan(contest, model, peers, is_packed)


def _model(random_weights: str | None, pair: PairConfig) -> PeerModel:
    if random_weights is None:
        named = checkpoints(pair.target, pair.draft)
        target = resolve(named.target)
        return PeerModel(target, None if named.draft is None else resolve(draft_of(named.draft)), named.names)
    asked = f"random_weights={random_weights!r}"
    if pair.target or pair.draft:
        raise ValueError(f"{asked}: is a target of its own; leave --target and --draft out")
    target = conversion("random_target", asked).random_target(random_weights)
    return PeerModel(target, None, (f"random weights, {Path(random_weights).name}", None), is_random=True)


def compare(plan: ContestPlan, on_progress: Progress = lambda stage: None) -> Comparison:
    """Run a plan. on_progress is called with the name of each stage as it begins.

    Raises ValueError if no peer can be opened, or if one fails later."""
    llms = _load(plan, on_progress)
    llm = next(iter(llms.values()))
    prompts, scenario = _prompts(plan.contest, llm)
    threads = int(str(llm.models.system()["threads"]))
    max_context = plan.contest.prompt_tokens + plan.contest.new_tokens + 1
    setup = PeerSetup(plan.model.target, plan.model.draft, threads, max_context, plan.contest.batch)
    others, absent = _open(plan, setup, prompts[-1], on_progress)
    try:
        checks = _check(plan, setup, others, llms, on_progress)
        own = _own(plan, llms)
        for ours in own:
            on_progress(f"warming up {ours.label}")
            ours.run(prompts[-1], plan.contest.sampling(0))
            ours.runs.clear()
        settings: list[Own | Other] = [*own, *others]
        _measure(plan.contest, settings, prompts[:-1], on_progress)
        results = [setting.result(scenario, plan.model) for setting in settings]
        rows = _standings(plan.contest, settings, results, checks, llm.models.tokenizer)
        on_progress("this machine's bandwidth")
        moved = {
            row.label: _moved(plan.contest, ours.llm, row)
            for ours, row in zip(own, rows, strict=False)
            if not ours.drafting.is_speculative
        }
        return Comparison(rows, results, checks, absent, llm.models.system(), moved)
    finally:
        for other in others:
            other.peer.close()


def _open_own(plan: ContestPlan, draft: Path | None, dtype: str, arithmetic: str = "auto") -> LLM:
    work = plan.contest
    engine = EngineConfig(
        max_batch=work.batch, prefix_cache=False, max_context=work.prompt_tokens + work.new_tokens + SPARE_TOKENS,
        # All prompts of a run are computed in one step, as every peer does; so decoding is timed without prefill.
        row_budget=max(EngineConfig().row_budget, work.batch * work.prompt_tokens),
    )  # fmt: skip
    return LLM(plan.model.target, draft, dtype=dtype, arithmetic=arithmetic, engine=engine)


def _load(plan: ContestPlan, on_progress: Progress) -> dict[str, LLM]:
    """Our engines by storage. The first is the baseline: a GGUF file as it is, or a checkpoint without rounding. The
    rounded storages run if a peer runs them too."""
    first = {PACKED: (PACKED, "auto")} if plan.is_packed else {"float32": (stored_dtype(plan.model.target), "float32")}
    more = {"bfloat16": ("bfloat16", "bfloat16")} if plan.contest.bf16_arithmetic else {}
    rounded = {name: (name, "auto") for name in QUANTISED if any(spec.dtype == name for spec in plan.peers)}
    llms = {}
    for name, (dtype, arithmetic) in (first | more | rounded).items():
        on_progress(f"loading aquiline, {dtype} weights, {arithmetic} arithmetic")
        llms[name] = _open_own(plan, plan.model.draft, dtype, arithmetic)
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
            other.run(warm, plan.contest.sampling(0))
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
    prompts = [prompt.token_ids for prompt in _token_prompts(plan.contest, next(iter(llms.values())), CHECK_PROMPTS)]
    checks = {}
    for spec in {other.spec.model: other.spec for other in others if other.spec.kind != "openai"}.values():
        on_progress(f"checking {spec.model}")
        exact = str(spec.plain.dtype)
        if exact not in references:
            references[exact] = _open_own(plan, None, "float32")
        checks[spec.model] = check(references[exact], spec, setup, prompts)
    return checks


def check(llm: LLM, spec: PeerSpec, setup: PeerSetup, prompts: list[list[int]]) -> Checked:
    """Compare a kind of peer with `llm`, which runs the same weights, one prompt at a time."""
    sampling = SamplingParams(max_tokens=CHECK_TOKENS, ignore_eos=True)
    is_packed = spec.plain.dtype == PACKED
    count = _num_next if is_packed else _num_leading
    room = max(map(len, prompts)) + CHECK_TOKENS + 1
    peer = spec.plain.open(replace(setup, batch=1, max_context=max(setup.max_context, room)))
    try:
        ours = [llm.run([prompt], sampling, drafting=NoDraft()).outputs[0].token_ids for prompt in prompts]
        return Checked(tuple(count(peer, p, ids) for p, ids in zip(prompts, ours, strict=True)), is_packed)
    finally:
        peer.close()


def _num_leading(peer: Peer, prompt: list[int], expected: list[int]) -> int:
    """How many leading tokens are the expected ones."""
    return agreement(peer.generate([prompt], len(expected), 0.0)[0], expected, None) or 0


def _num_next(peer: Peer, prompt: list[int], expected: list[int]) -> int:
    """How many tokens are the expected ones, each after the expected text before it."""
    return sum(
        peer.generate([prompt + expected[:i]], 1, 0.0)[0].token_ids == [token] for i, token in enumerate(expected)
    )


def _moved(contest: Contest, llm: LLM, row: Standing) -> tuple[float, float]:
    """Two bandwidths in GB/s: that of a plain setting, if each step reads every weight and all keys so far, and that of
    plain reads."""
    roofline = roofline_of(llm.models)
    step = roofline.step(contest.batch, contest.prompt_tokens + contest.new_tokens // 2)
    return step.cost.num_bytes * row.rate.value / contest.batch / GIGA, roofline.ceilings.bandwidth.per_s / GIGA


def _own(plan: ContestPlan, llms: dict[str, LLM]) -> list[Own]:
    specs: dict[str, Drafting] = {"baseline": NoDraft()}
    if plan.model.draft is not None:
        specs |= {f"chain-{k}": Chain(k) for k in plan.contest.num_spec_tokens}
        specs["tree"] = Dynamic()
    return [
        Own(f"{name} in {storage}" if number else name, llm, spec)
        for number, (storage, llm) in enumerate(llms.items())
        for name, spec in specs.items()
    ]


def _prompts(contest: Contest, llm: LLM) -> tuple[list[list[list[int]]], Scenario]:
    """The prompts of each measured run and, at the end, those of the run that warms up. No engine has seen a measured
    prompt before."""
    found = _token_prompts(contest, llm, (contest.repeats + 1) * contest.batch)
    prompts, held_out = [prompt.token_ids for prompt in found], all(prompt.is_held_out for prompt in found)
    source = f"{contest.text_source or 'standard library'}{', held out' if held_out else ', partly trained on'}"
    groups = [prompts[i : i + contest.batch] for i in range(0, len(prompts), contest.batch)]
    return groups, Scenario(
        name="peers", profile="cpu", context_tokens=contest.prompt_tokens, batch=contest.batch,
        new_tokens=contest.new_tokens, temperature=contest.temperature, seed=0,
        prompts_sha256=tokens_sha256(prompts[: -contest.batch]), prompts_source=source, warmup_runs=1,
        measurement_runs=contest.repeats,
    )  # fmt: skip


def _token_prompts(contest: Contest, llm: LLM, count: int) -> list[TokenPrompt]:
    """`count` prompts of the target's vocabulary. A smaller count gives the first prompts of a larger one."""
    tokenizer = llm.models.tokenizer or Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))
    found = text_prompts(contest.prompt_tokens, count, tokenizer, contest.text_source)
    return [replace(p, token_ids=[token % llm.models.vocab_size for token in p.token_ids]) for p in found]


def _measure(
    contest: Contest, settings: list[Own | Other], prompts: list[list[list[int]]], on_progress: Progress
) -> None:
    """Run every setting on the prompts of every round; each round begins with another setting."""
    for index, group in enumerate(prompts):
        for setting in rotated(settings, index):
            on_progress(f"run {index + 1} of {len(prompts)}: {setting.label}")
            time.sleep(SETTLE_S)
            try:
                setting.run(group, contest.sampling(index))
            except (ValueError, RuntimeError) as error:
                raise ValueError(f"{setting.label}: failed in run {index + 1} of {len(prompts)}: {error}") from error


def _standings(
    contest: Contest,
    settings: list[Own | Other],
    results: list[Result],
    checks: dict[str, Checked],
    tokenizer: Tokenizer | None,
) -> list[Standing]:
    """How every setting did. Writes into each result why it is void."""
    expected = [output.token_ids for output in settings[0].outputs]
    rows = []
    for setting, result in zip(settings, results, strict=True):
        outputs: Sequence[Output | PeerOutput] = setting.outputs
        counts = [agreement(output, ids, tokenizer) for output, ids in zip(outputs, expected, strict=True)]
        # At a temperature only our own settings can agree: other engines draw with other noise.
        is_known = contest.temperature == 0 or isinstance(setting, Own)
        agreed = [float(count) for count in counts if count is not None and is_known]
        checked = checks.get(setting.spec.model) if isinstance(setting, Other) else None
        result["void"] = void(result, results[0], checked, agreed)
        rows.append(standing_of(result, mean(agreed) if agreed else None))
    return rows

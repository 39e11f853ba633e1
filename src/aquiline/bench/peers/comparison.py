"""aquiline against its peers: the same weights, prompts and token counts, every setting in turn, one verdict.

A comparison with an engine that computes another model says nothing. So before anything is timed, every kind of peer
continues a few prompts, and its tokens must be ours on every prompt (`check`); otherwise the kind is void. The tokens
of the timed settings are compared with ours and reported too, but they may differ: in bfloat16 a near tie may fall
either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from aquiline.backends.cpu.native_weights import paired_arithmetics
from aquiline.bench.data.prompts import RealPrompts, real_prompts
from aquiline.bench.peers.contest import Contest
from aquiline.bench.peers.contestants import Other, Own, PeerModel
from aquiline.bench.peers.names import ALL_PEERS, PACKED_PEERS, QUANTISED, PeerSpec, parse_peers
from aquiline.bench.peers.peer import Peer, PeerSetup, conversion, stored_dtype
from aquiline.bench.peers.verdict import CHECK_TOKENS, Checked, Comparison, Standing, num_agreed, standing_of, void
from aquiline.bench.results.intervals import rotated
from aquiline.bench.results.result import Result, Scenario, tokens_sha256
from aquiline.bench.theory.ceilings import GIGA
from aquiline.bench.theory.roofline import roofline_of
from aquiline.blocks import PACKED
from aquiline.config import EngineConfig, Environment, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, for_checkpoint
from aquiline.errors import AquilineError
from aquiline.metrics import mean
from aquiline.models.known_pairs import checkpoints, draft_of
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
    return _Contesting(plan, on_progress).run()


class _Contesting:
    """A plan that runs: our engines by storage, the first of which is the baseline's, and the peers that are open."""

    def __init__(self, plan: ContestPlan, on_progress: Progress) -> None:
        self.plan, self.work, self.model, self.told = plan, plan.contest, plan.model, on_progress
        self.llms = self._load()
        self.llm = next(iter(self.llms.values()))
        self.system = self.llm.models.system()
        max_context = self.work.prompt_tokens + self.work.new_tokens + 1
        threads = int(str(self.system["threads"]))
        self.setup = PeerSetup(self.model.target, self.model.draft, threads, max_context, self.work.batch)

    def run(self) -> Comparison:
        """Check, measure and compare all settings."""
        found = real_prompts(
            self.work.prompt_tokens, (self.work.repeats + 1) * self.work.batch, self.llm.models, self.work.text_source
        )
        groups = [found.token_ids[i : i + self.work.batch] for i in range(0, len(found.token_ids), self.work.batch)]
        own = self._own()
        others, absent = self._open(groups[-1])  # no engine sees a measured prompt before its round
        try:
            checks = self._check(others)
            for ours in own:
                self._warm(ours, groups[-1])
            settings: list[Own | Other] = [*own, *others]
            self._measure(settings, groups[:-1])
            scenario = self._scenario(found, groups[:-1])
            results = [setting.result(scenario, self.model) for setting in settings]
            rows = self._standings(settings, results, checks)
            self.told("this machine's bandwidth")
            plain = [(row, each) for row, each in zip(rows, own, strict=False) if not each.drafting.is_speculative]
            moved = {row.label: self._moved(each.llm, row) for row, each in plain}
            return Comparison(rows, results, checks, absent, self.system, moved)
        finally:
            for other in others:
                other.peer.close()

    def _open_own(self, draft: Path | None, dtype: str, arithmetic: str = "auto") -> LLM:
        work = self.work
        engine = EngineConfig(
            max_batch=work.batch, prefix_cache=False, max_context=work.prompt_tokens + work.new_tokens + SPARE_TOKENS,
            # Several prompts are computed in one step, as every peer does; so decoding is timed without prefill.
            row_budget=max(EngineConfig().row_budget, work.batch * work.prompt_tokens if work.batch > 1 else 0),
        )  # fmt: skip
        return LLM(self.model.target, draft, dtype=dtype, arithmetic=arithmetic, engine=engine)

    def _load(self) -> dict[str, LLM]:
        """Our engines by storage. The first is the baseline: a GGUF file as it is, or a checkpoint without rounding.
        The rounded storages run if a peer runs them too."""
        exact = (stored_dtype(self.model.target), "float32")
        first = {PACKED: (PACKED, "auto")} if self.plan.is_packed else {"float32": exact}
        more = {}
        if self.work.bf16_arithmetic:
            more["bfloat16"] = ("bfloat16", ["bfloat16", *paired_arithmetics()][-1])
        rounded = {name: (name, "auto") for name in QUANTISED if any(spec.dtype == name for spec in self.plan.peers)}
        llms = {}
        for name, (dtype, arithmetic) in (first | more | rounded).items():
            self.told(f"loading aquiline, {dtype} weights, {arithmetic} arithmetic")
            llms[name] = self._open_own(self.model.draft, dtype, arithmetic)
        return llms

    def _own(self) -> list[Own]:
        drafts: dict[str, Drafting] = {"baseline": NoDraft()}
        if self.model.draft is not None:
            drafts |= {f"chain-{k}": Chain(k) for k in self.work.num_spec_tokens} | {"tree": Dynamic()}
        return [
            Own(f"{name} in {storage}" if number else name, llm, drafting)
            for number, (storage, llm) in enumerate(self.llms.items())
            for name, drafting in drafts.items()
        ]

    def _open(self, prompts: list[list[int]]) -> tuple[list[Other], dict[str, str]]:
        """The peers that can run, warmed up; and for the others, by label, the reason why they cannot."""
        others, absent = [], {}
        for spec in self.plan.peers:
            self.told(f"loading {spec.label}")
            try:
                others.append(Other(spec, spec.open(self.setup)))
                self._warm(others[-1], prompts)
            except (ValueError, AquilineError, RuntimeError) as error:  # RuntimeError is what native code raises
                absent[spec.label] = " ".join(str(error).split())
                others = [other for other in others if other.spec is not spec]
        if not others:
            raise ValueError("no peer can run: " + "; ".join(dict.fromkeys(absent.values())))
        return others, absent

    def _warm(self, setting: Own | Other, prompts: list[list[int]]) -> None:
        self.told(f"warming up {setting.label}")
        setting.run(prompts, self.work.sampling(0))
        setting.runs.clear()

    def _check(self, others: list[Other]) -> dict[str, Checked]:
        """The check of every kind of peer that runs here, against our engine on the same weights."""
        references, work = dict(self.llms), self.work
        prompts = real_prompts(work.prompt_tokens, CHECK_PROMPTS, self.llm.models, work.text_source).token_ids
        checks = {}
        for spec in {other.spec.model: other.spec for other in others if other.spec.kind != "openai"}.values():
            self.told(f"checking {spec.model}")
            exact = str(spec.plain.dtype)
            if exact not in references:
                references[exact] = self._open_own(None, "float32")
            checks[spec.model] = check(references[exact], spec, self.setup, prompts)
        return checks

    def _measure(self, settings: list[Own | Other], prompts: list[list[list[int]]]) -> None:
        """Run every setting on the prompts of every round; each round begins with another setting."""
        for index, group in enumerate(prompts):
            for setting in rotated(settings, index):
                self.told(f"run {index + 1} of {len(prompts)}: {setting.label}")
                time.sleep(SETTLE_S)
                try:
                    setting.run(group, self.work.sampling(index))
                except (ValueError, RuntimeError) as error:
                    where = f"{setting.label}: failed in run {index + 1} of {len(prompts)}"
                    raise ValueError(f"{where}: {error}") from error

    def _scenario(self, found: RealPrompts, measured: list[list[list[int]]]) -> Scenario:
        work = self.work
        return Scenario(
            name="peers", profile="cpu", context_tokens=work.prompt_tokens, batch=work.batch,
            new_tokens=work.new_tokens, temperature=work.temperature, seed=0,
            prompts_sha256=tokens_sha256(prompt for group in measured for prompt in group),
            prompts_source=found.source, warmup_runs=1, measurement_runs=work.repeats,
        )  # fmt: skip

    def _standings(
        self, settings: list[Own | Other], results: list[Result], checks: dict[str, Checked]
    ) -> list[Standing]:
        """How every setting did. Writes into each result why it is void."""
        outputs = [[o for run in s.runs for o in (run if isinstance(run, list) else run.outputs)] for s in settings]
        rows = []
        for setting, own, result in zip(settings, outputs, results, strict=True):
            counts = [
                num_agreed(output, base.token_ids, self.llm.models.tokenizer)
                for output, base in zip(own, outputs[0], strict=True)
            ]
            # At a temperature only our own settings can agree: other engines draw with other noise.
            is_known = self.work.temperature == 0 or isinstance(setting, Own)
            agreed = [float(count) for count in counts if count is not None and is_known]
            checked = checks.get(setting.spec.model) if isinstance(setting, Other) else None
            result["void"] = void(result, results[0], checked, agreed)
            rows.append(standing_of(result, mean(agreed) if agreed else None))
        return rows

    def _moved(self, llm: LLM, row: Standing) -> tuple[float, float]:
        """Two bandwidths in GB/s: that of a plain setting, if each step reads every weight and all keys so far, and
        that of plain reads."""
        roofline, batch = roofline_of(llm.models), self.work.batch
        step = roofline.step(batch, self.work.prompt_tokens + self.work.new_tokens // 2)
        return step.cost.num_bytes * row.rate.value / batch / GIGA, roofline.ceilings.bandwidth.per_s / GIGA


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
    return num_agreed(peer.generate([prompt], len(expected), 0.0)[0], expected, None) or 0


def _num_next(peer: Peer, prompt: list[int], expected: list[int]) -> int:
    """How many tokens are the expected ones, each after the expected text before it."""
    return sum(
        peer.generate([prompt + expected[:i]], 1, 0.0)[0].token_ids == [token] for i, token in enumerate(expected)
    )

"""One JSON per setting and scenario: describing what was measured, writing it, reading it back.

The schema is result.schema.json. A result with problems (see integrity) is neither written nor read, so that every
command refuses the same results. A result of uncommitted changes is read, but not published: it cannot be measured
again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from aquiline.bench.results.integrity import SCHEMA, problems
from aquiline.bench.results.intervals import Span, decode_tokens_per_s, spans_of, spread
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as Run
from aquiline.errors import ResultError
from aquiline.ledger import Ledger
from aquiline.metrics import Counters, mean, peak_memory_bytes, repeated_share
from aquiline.spec.drafting import Drafting, NoDraft
from aquiline.writing import write_whole

Result = dict[str, Any]

DIRTY = "-dirty"
"""The end of a commit's name if the source tree has uncommitted changes."""
SOURCE = (":/src", ":/csrc", ":/setup.py", ":/pyproject.toml")
"""The paths that decide which program runs. Results and documents are not among them, since they change while results
are written."""


@dataclass(frozen=True)
class Scenario:
    """The work that an engine was given. profile: "cpu" for contexts that a CPU can run, or "full"; results of the two
    are never compared."""

    name: str
    profile: str
    context_tokens: int
    batch: int
    new_tokens: int
    temperature: float
    seed: int
    prompts_sha256: str
    prompts_source: str
    warmup_runs: int
    measurement_runs: int


@dataclass(frozen=True)
class ModelFacts:
    """The models that ran, with names that mean something on other machines: no paths."""

    target: str
    draft: str | None
    dtype: str
    arithmetic: str
    random_weights: bool
    simulated_tau: float | None
    weight_bytes: int


def is_speculative(result: Result) -> bool:
    """Whether drafts were verified; otherwise the result is a baseline."""
    return bool(result["setting"]["drafter"] != NoDraft.name)


def describe(
    scenario: Scenario, setting: str, drafting: Drafting, model: ModelFacts, llm: LLM, runs: list[Run],
    prefill: Run | None = None,
) -> Result:  # fmt: skip
    """The result of the measured runs of one setting, in the order of their rounds. prefill: the run that computed the
    prompts, if the measured runs found them in the prefix cache; times to the first token are then those of prefill."""
    prompted = runs if prefill is None else [prefill]
    chosen = reduce(Ledger.plus, (run.summary.choices for run in runs)).as_dict()
    spans, firsts = ([spans_of(run.outputs) for run in each] for each in (runs, prompted))
    return result_of(
        scenario, model, Counters.sum_of(run.summary.counters for run in runs),
        spans, [output.token_ids for output in runs[0].outputs],
        firsts, [run.summary.prefill_tokens_per_s for run in prompted],
        engine="aquiline",
        setting={
            "name": setting,
            "drafter": drafting.name,
            "num_spec_tokens": drafting.as_dict().get("num_spec_tokens"),
            "max_nodes": drafting.max_nodes,
        },
        memory={
            "kv_bytes_per_token": llm.engine.memory.kv_bytes_per_token,
            "kv_bytes": llm.engine.memory.kv_bytes,
            "peak_bytes": peak_memory_bytes(),
        },
        stage_ms=_stage_ms(runs), slots=asdict(runs[-1].summary.slots), system=llm.models.system(),
        **({} if chosen is None else {"adaptive": chosen}),
    )  # fmt: skip


def result_of(
    scenario: Scenario, model: ModelFacts, counters: Counters, runs: Sequence[Sequence[Span]], first: list[list[int]],
    prompted: Sequence[Sequence[Span]], prefill_rates: list[float], **stated: object,
) -> Result:  # fmt: skip
    """A result of any engine, from its runs. first: token ids of the first run's outputs; prompted: the runs that
    computed the prompts, with their prompt tokens per second; stated: the objects that only the engine knows."""
    rates = [decode_tokens_per_s(run) for run in runs]
    return {
        "schema": SCHEMA,
        "scenario": asdict(scenario) | {"repeated_share": mean(list(map(repeated_share, first)))},
        "model": asdict(model),
        "throughput_tokens_per_sec": spread(rates),
        "prefill_tokens_per_sec": spread(prefill_rates),
        "latency_ms_per_token": spread([scenario.batch / rate * 1e3 for rate in rates]),
        "ttft_ms": spread([statistics.median(span.first_ms for span in run) for run in prompted]),
        "itl_ms": spread([statistics.median(span.ms_per_token for span in run) for run in runs]),
        "output": {"num_tokens": [span.num_tokens for run in runs for span in run], "sha256": tokens_sha256(first)},
        "eagle_speculation": _speculation(counters),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    } | stated


def _stage_ms(runs: list[Run]) -> dict[str, float]:
    """Milliseconds of a decode step by stage, mean of all runs' steps."""
    summaries = [run.summary for run in runs]
    steps = sum(s.num_decode_steps for s in summaries)
    return {name: sum(s.stage_ms[name] for s in summaries) / steps if steps else 0.0 for name in summaries[0].stage_ms}


def _speculation(counters: Counters) -> dict[str, object]:
    """The eagle_speculation object of a result."""
    return {
        "mean_acceptance_rate": counters.acceptance_rate,
        "mean_acceptance_length": counters.tau,
        "total_accepted_tokens": counters.num_accepted_tokens,
        "total_draft_tokens": counters.num_draft_tokens,
        "fraction_steps_accept_ge2": counters.fraction_ge2,
        "per_position": counters.per_position,
        "num_drafts": counters.num_steps if counters.num_draft_tokens else 0,
        "num_steps": counters.num_steps,
        "num_committed": counters.num_committed,
        "num_prefilled": counters.num_prefilled,
        "tokens_cut": counters.tokens_cut,
        "specpv_enabled": False,
        "sink": None,
        "retrieval": None,
        "window": None,
    }


def write_result(result: Result, file: Path) -> None:
    """Write a result, whole or not at all. Raises ResultError if `read_results` would refuse it."""
    _refuse(str(file), problems(result))
    kept = "Results before it are whole; the same command measures the rest"
    write_whole(file, json.dumps(result, indent=1) + "\n", kept)


def read_results(directory: Path) -> dict[str, Result]:
    """Every result of a directory by file name. Raises ResultError naming each file that is broken and why."""
    if not directory.is_dir():
        raise ResultError(f"{directory}: is no directory; name the one that `aquiline bench --out` wrote")
    found: dict[str, Result] = {}
    broken = []
    for file in sorted(directory.glob("*.json")):
        try:
            found[file.name] = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            broken.append(f"{file.name}: not JSON ({error})")
    broken += [f"{name}: {problem}" for name, result in found.items() for problem in problems(result)]
    _refuse(str(directory), broken)
    if not found:
        raise ResultError(f"{directory}: holds no results; run `aquiline bench --out {directory}` first")
    return found


def tokens_sha256(sequences: Iterable[list[int]]) -> str:
    """A hash that identifies the token ids of several sequences."""
    return hashlib.sha256(json.dumps(list(sequences)).encode()).hexdigest()


def is_dirty(result: Result) -> bool:
    """Whether a result was measured with changes that are in no commit."""
    return str(result["commit"]).endswith(DIRTY)


def require_published(results: Mapping[str, Result]) -> None:
    """Raises ResultError naming each result that may not be published, because it cannot be measured again."""
    found = {name: result["commit"] for name, result in results.items() if is_dirty(result)}
    reasons = [f"{name}: commit: {of!r} has changes that are in no commit" for name, of in found.items()]
    _refuse("results to publish", reasons + (["commit the source, then measure again"] if reasons else []))


@lru_cache
def commit() -> str:
    """The commit of the source tree that runs, followed by "-dirty" if SOURCE has uncommitted changes; "unknown" for an
    installed package."""
    return commit_of(Path(__file__).parent)


def commit_of(directory: Path) -> str:
    """`commit` of the source tree that holds a directory."""
    head = _git(directory, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + (DIRTY if _git(directory, "status", "--porcelain", "--", *SOURCE) else "")


def _git(directory: Path, *arguments: str) -> str:
    """The output of a git command; empty without git or without a repository."""
    with contextlib.suppress(OSError):
        return subprocess.run(["git", "-C", str(directory), *arguments], capture_output=True, text=True).stdout.strip()
    return ""


def _refuse(where: str, reasons: list[str]) -> None:
    if reasons:
        lines = "\n".join(f"  - {reason}" for reason in reasons)
        raise ResultError(f"{where}: refused\n{lines}")

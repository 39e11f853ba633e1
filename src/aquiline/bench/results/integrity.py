"""Every reason not to believe a result, and not to compare two results.

Fields have the types of result.schema.json. Figures that a result states twice must agree. No number is NaN or
infinite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema

from aquiline.bench.results.intervals import spread

if TYPE_CHECKING:
    from aquiline.bench.results.result import Result

SCHEMA = "aquiline.result/2"

CLOSE = 1e-6
"""Two computations of the same figure may differ by this share, because of rounding."""

SPREADS = ("throughput_tokens_per_sec", "prefill_tokens_per_sec", "latency_ms_per_token", "ttft_ms", "itl_ms")


def problems(result: object) -> list[str]:
    """Why a result cannot be believed; empty if it can."""
    found = [*_not_finite(result), *_not_by_schema(result)]
    if found or not isinstance(result, dict):
        return found
    own = _own(result) if result["engine"] == "aquiline" else ()
    return [*_spreads(result), *_output(result), *own]


def differences(result: Result, baseline: Result) -> list[str]:
    """Reasons why the ratio of two results means nothing; empty if it means something."""
    found = []
    same_engine = result["engine"] == baseline["engine"]
    same = ("name", "profile", "context_tokens", "batch", "new_tokens", "temperature", "seed", "prompts_sha256")
    for name in same:
        a, b = result["scenario"][name], baseline["scenario"][name]
        if a != b:
            found.append(f"scenario.{name}: {a!r} against {b!r}")
    for name in ("target", "dtype", "arithmetic", "random_weights"):
        a, b = result["model"][name], baseline["model"][name]
        if a != b and same_engine:
            found.append(f"model.{name}: {a!r} against {b!r}")
    if result["output"]["num_tokens"] != baseline["output"]["num_tokens"]:
        found.append(
            f"output.num_tokens: {sum(result['output']['num_tokens'])} against {sum(baseline['output']['num_tokens'])}"
        )
    exact = same_engine and result["engine"] == "aquiline" and result["model"]["simulated_tau"] is None
    if exact and result["output"]["sha256"] != baseline["output"]["sha256"]:
        found.append("output.sha256: the texts differ")
    for name in ("cpu", "threads", *(("isa", "path") if same_engine else ())):
        a, b = result["system"].get(name), baseline["system"].get(name)
        if a != b:
            found.append(f"system.{name}: {a!r} against {b!r}")
    return found


def recomputed_tau(result: Result) -> float:
    """Tau from output lengths: tokens that decode steps committed, per (active slot, step) pair."""
    drafting = result["eagle_speculation"]
    committed = sum(result["output"]["num_tokens"]) - drafting["num_prefilled"]
    return committed / drafting["num_steps"] if drafting["num_steps"] else 0.0


def _not_by_schema(result: object) -> Iterator[str]:
    for error in jsonschema.Draft202012Validator(_schema()).iter_errors(result):
        where = ".".join(str(part) for part in error.absolute_path) or "result"
        yield f"{where}: {'must not be empty' if error.validator == 'pattern' else error.message}"


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Every NaN and infinity, at any depth. JSON does not have them, but Python's reader accepts them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: {value} is not a finite number"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_finite(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_finite(inner, f"{path}.{index}")


def _spreads(result: Result) -> Iterator[str]:
    for name in SPREADS:
        values = result[name]["values"]
        derived = spread(values)
        if any(_differ(result[name][key], derived[key]) for key in ("median", "low", "high", "min", "max")):
            yield f"{name}: median, low, high, min and max are not those of its values"
    values, asked = result["throughput_tokens_per_sec"]["values"], result["scenario"]["measurement_runs"]
    if min(values) <= 0:
        yield "throughput_tokens_per_sec: is 0; nothing was measured"
    if len(values) != asked:
        yield f"throughput_tokens_per_sec: {len(values)} values, measurement_runs says {asked}"


def _output(result: Result) -> Iterator[str]:
    scenario, num_tokens = result["scenario"], result["output"]["num_tokens"]
    asked = scenario["batch"] * scenario["measurement_runs"]
    if len(num_tokens) != asked:
        yield f"output.num_tokens: {len(num_tokens)} outputs, batch * measurement_runs is {asked}"
    elif max(num_tokens) > scenario["new_tokens"]:
        yield f"output.num_tokens: {max(num_tokens)} tokens, scenario.new_tokens is {scenario['new_tokens']}"


def _own(result: Result) -> list[str]:
    """Problems of our own results: facts that are missing, and figures that disagree. Other engines' figures are not
    checked here, since each engine counts in its own way."""
    system, batch, drafting = result["system"], result["scenario"]["batch"], result["eagle_speculation"]
    found = [f"system.{name}: is missing" for name in ("cpu", "threads", "isa", "path") if name not in system]
    latency, throughput = (result[name]["values"] for name in ("latency_ms_per_token", "throughput_tokens_per_sec"))
    expected = [batch / value * 1e3 for value in throughput if value]
    if len(latency) != len(expected) or any(map(_differ, latency, expected)):
        found.append("latency_ms_per_token: is not scenario.batch over throughput_tokens_per_sec, run by run")
    num_tokens, counted = sum(result["output"]["num_tokens"]), drafting["num_prefilled"] + drafting["num_committed"]
    if num_tokens != counted:
        found.append(f"output.num_tokens: {num_tokens} tokens, but num_prefilled + num_committed = {counted}")
    tau = recomputed_tau(result)
    if _differ(tau, drafting["mean_acceptance_length"]):
        found.append(f"mean_acceptance_length: {drafting['mean_acceptance_length']}, the output lengths say {tau}")
    return found + _counters(drafting, result["setting"])


def _counters(drafting: Result, setting: Result) -> list[str]:
    """Problems of the counters: a step commits its accepted drafts and one token of the target's, minus cut tokens."""
    found = []
    steps, drafted, accepted = drafting["num_steps"], drafting["total_draft_tokens"], drafting["total_accepted_tokens"]
    if not steps:
        found.append("eagle_speculation.num_steps: is 0; nothing was decoded")
    if drafting["num_committed"] + drafting["tokens_cut"] != accepted + steps:
        found.append(
            f"eagle_speculation: total_accepted_tokens {accepted} + num_steps {steps} are not num_committed "
            f"{drafting['num_committed']} + tokens_cut {drafting['tokens_cut']}"
        )
    if setting["drafter"] == "none" and drafted:
        found.append("eagle_speculation: drafts counted without a drafter")
    if setting["drafter"] not in ("none", "adaptive") and not drafted:  # adaptive drafting may find that nothing pays
        found.append(f"eagle_speculation.total_draft_tokens: is 0 with setting.drafter {setting['drafter']!r}")
    if _differ(drafting["mean_acceptance_rate"], accepted / drafted if drafted else 0.0):
        found.append(
            f"eagle_speculation.mean_acceptance_rate: is {drafting['mean_acceptance_rate']}, total_accepted_tokens "
            f"{accepted} of total_draft_tokens {drafted}"
        )
    if _differ(sum(drafting["per_position"]) * steps, accepted):
        found.append(
            f"eagle_speculation.per_position: in num_steps {steps} is not total_accepted_tokens {accepted} in all"
        )
    if drafting["num_drafts"] != (steps if drafted else 0):
        found.append(
            f"eagle_speculation.num_drafts: is {drafting['num_drafts']}, num_steps {steps} drafted {drafted} tokens"
        )
    if setting["drafter"] == "chain":
        longest = setting.get("num_spec_tokens")
        if longest is None:
            found.append("setting.num_spec_tokens: is missing; a chain has a length")
        elif len(drafting["per_position"]) > longest:
            found.append(
                f"setting.num_spec_tokens: is {longest}, accepted positions reach {len(drafting['per_position'])}"
            )
    return found


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > CLOSE * max(1.0, abs(a), abs(b))


@lru_cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8"))
    return schema

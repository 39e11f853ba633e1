"""Every reason not to believe a result, and not to compare two results.

The form of a result is result.schema.json's. The checks here are those that a schema cannot make: no number is NaN or
infinite, and figures that a result states twice agree.
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
    from aquiline.bench.results.speedups import Ratio, Results

SCHEMA = "aquiline.result/2"

CLOSE = 1e-6
"""Two computations of the same figure may differ by this share, because of rounding."""

SPREADS = ("throughput_tokens_per_sec", "prefill_tokens_per_sec", "latency_ms_per_token", "ttft_ms", "itl_ms")

Claims = Iterator[tuple[bool, str]]
"""Whether each condition holds, and the problem if it does not."""


def problems(result: object) -> list[str]:
    """Why a result cannot be believed; empty if it can."""
    found = schema_problems(result, _schema(), "result")
    if found or not isinstance(result, dict):
        return found
    claims = [*_figures(result), *(_own(result) if result["engine"] == "aquiline" else ())]
    return [problem for holds, problem in claims if not holds]


def schema_problems(value: object, schema: dict[str, Any], name: str) -> list[str]:
    """Where a value breaks a JSON schema or holds a number that is not finite. name: what to call the value itself."""
    found = list(_not_finite(value))
    for error in jsonschema.Draft202012Validator(schema).iter_errors(value):
        where = ".".join(map(str, error.absolute_path)) or name
        found.append(f"{where}: {'must not be empty' if error.validator == 'pattern' else error.message}")
    return found


def differences(result: Result, baseline: Result, is_one_machine: bool = True) -> list[str]:
    """Reasons why two results may not be compared; empty if they may. is_one_machine: whether they must be of the same
    machine, as for a ratio of speeds."""

    def unequal(part: str, *names: str) -> list[str]:
        pairs = {name: (result[part].get(name), baseline[part].get(name)) for name in names}
        return [f"{part}.{name}: {a!r} against {b!r}" for name, (a, b) in pairs.items() if a != b]

    same_engine = result["engine"] == baseline["engine"]
    work = ("name", "profile", "context_tokens", "batch", "new_tokens", "temperature", "seed", "prompts_sha256")
    found = unequal("scenario", *work)
    if same_engine:
        found += unequal("model", "target", "dtype", "arithmetic", "random_weights")
    output, other = result["output"], baseline["output"]
    if output["num_tokens"] != other["num_tokens"]:
        found.append(f"output.num_tokens: {sum(output['num_tokens'])} against {sum(other['num_tokens'])}")
    exact = same_engine and result["engine"] == "aquiline" and result["model"]["simulated_tau"] is None
    if exact and output["sha256"] != other["sha256"]:
        found.append("output.sha256: the texts differ")
    system = ("cpu", "threads", *(("isa", "path") if same_engine else ()))
    return found + (unequal("system", *system) if is_one_machine else [])


def unfit(name: str, ratio: Ratio, results: Results) -> list[str]:
    """Why a result must not be judged: it has no fair baseline, its figures are simulated, its weights are random, or
    it or its baseline broke a rule of PERF mode."""
    against = "" if ratio.other is None else f"against {ratio.other}: "
    found = [f"{against}{reason}" for reason in ratio.reasons]
    model = results[name]["model"]
    if model["simulated_tau"] is not None:
        found.append(f"model.simulated_tau: {model['simulated_tau']:g} was chosen, not measured")
    found += ["model.random_weights: a gate asks about a real model"] if model["random_weights"] else []
    for run in (results[file] for file in (name, ratio.other) if file is not None):
        found += [f"PERF violation of {run['setting']['name']}: {violation}" for violation in _violations(run)]
    return found


def _violations(result: Result) -> list[str]:
    """The rules of PERF mode that a run broke."""
    found = list(result.get("perf_violations", []))
    disabled = result.get("slots", {}).get("disabled_other")
    if disabled is None:
        found.append("slots.disabled_other: is missing, so whether every slot decoded is not known")
    elif disabled:
        found.append(f"slots.disabled_other: {disabled} slots did not decode for another reason than their end")
    is_torch = result["system"]["path"] == "torch"
    return found + (["system.path: torch, the fallback without the native library"] if is_torch else [])


def recomputed_tau(result: Result) -> float:
    """Tau from output lengths: tokens that decode steps committed, per (active slot, step) pair."""
    drafting = result["eagle_speculation"]
    committed = sum(result["output"]["num_tokens"]) - drafting["num_prefilled"]
    return committed / drafting["num_steps"] if drafting["num_steps"] else 0.0


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Every NaN and infinity, at any depth. JSON does not have them, but Python's reader accepts them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: {value} is not a finite number"
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in inside:
        yield from _not_finite(inner, f"{path}.{name}" if path else str(name))


def _figures(result: Result) -> Claims:
    """Claims about the figures of any engine."""
    for name in SPREADS:
        derived = spread(result[name]["values"])
        agrees = not any(_differ(result[name][key], derived[key]) for key in ("median", "low", "high", "min", "max"))
        yield agrees, f"{name}: median, low, high, min and max are not those of its values"
    scenario, name, rates = result["scenario"], SPREADS[0], result[SPREADS[0]]["values"]
    num_runs, most = scenario["measurement_runs"], scenario["new_tokens"]
    yield min(rates) > 0, f"{name}: is 0; nothing was measured"
    yield len(rates) == num_runs, f"{name}: {len(rates)} values, measurement_runs says {num_runs}"
    name, num_tokens, asked = "output.num_tokens", result["output"]["num_tokens"], scenario["batch"] * num_runs
    yield len(num_tokens) == asked, f"{name}: {len(num_tokens)} outputs, batch * measurement_runs is {asked}"
    longest = max(num_tokens, default=0)
    yield longest <= most, f"{name}: {longest} tokens, scenario.new_tokens is {most}"


def _own(result: Result) -> Claims:
    """Claims about our own results. Other engines' figures are left alone, since each engine counts in its own way."""
    drafting = result["eagle_speculation"]
    for name in ("cpu", "threads", "isa", "path"):
        yield name in result["system"], f"system.{name}: is missing"
    latency, rates = (result[name]["values"] for name in ("latency_ms_per_token", "throughput_tokens_per_sec"))
    expected = [result["scenario"]["batch"] / rate * 1e3 for rate in rates if rate]
    agrees = len(latency) == len(expected) and not any(map(_differ, latency, expected))
    yield agrees, "latency_ms_per_token: is not scenario.batch over throughput_tokens_per_sec, run by run"
    num, counted = sum(result["output"]["num_tokens"]), drafting["num_prefilled"] + drafting["num_committed"]
    yield num == counted, f"output.num_tokens: {num} tokens, but num_prefilled + num_committed = {counted}"
    stated, tau = drafting["mean_acceptance_length"], recomputed_tau(result)
    yield not _differ(tau, stated), f"mean_acceptance_length: {stated}, the output lengths say {tau}"
    yield from _counters(drafting, result["setting"])


def _counters(drafting: Result, setting: Result) -> Claims:
    """Claims about the counters: a step commits its accepted drafts and one token of the target's, minus cut tokens."""
    where, drafter = "eagle_speculation", setting["drafter"]
    steps, drafted, accepted = drafting["num_steps"], drafting["total_draft_tokens"], drafting["total_accepted_tokens"]
    yield steps > 0, f"{where}.num_steps: is 0; nothing was decoded"
    committed, cut = drafting["num_committed"], drafting["tokens_cut"]
    sums = f"total_accepted_tokens {accepted} + num_steps {steps} are not num_committed {committed} + tokens_cut {cut}"
    yield accepted + steps == committed + cut, f"{where}: {sums}"
    yield not drafted or drafter != "none", f"{where}: drafts counted without a drafter"
    is_drafting = drafted > 0 or drafter in ("none", "adaptive")  # adaptive drafting may find that nothing pays
    yield is_drafting, f"{where}.total_draft_tokens: is 0 with setting.drafter {drafter!r}"
    rate, positions, num_drafts = (drafting[n] for n in ("mean_acceptance_rate", "per_position", "num_drafts"))
    said = f"is {rate}, total_accepted_tokens {accepted} of total_draft_tokens {drafted}"
    yield not _differ(rate, accepted / drafted if drafted else 0.0), f"{where}.mean_acceptance_rate: {said}"
    said = f"in num_steps {steps} is not total_accepted_tokens {accepted} in all"
    yield not _differ(sum(positions) * steps, accepted), f"{where}.per_position: {said}"
    said = f"is {num_drafts}, num_steps {steps} drafted {drafted} tokens"
    yield num_drafts == (steps if drafted else 0), f"{where}.num_drafts: {said}"
    where, length = "setting.num_spec_tokens", setting.get("num_spec_tokens") if drafter == "chain" else len(positions)
    yield length is not None, f"{where}: is missing; a chain has a length"
    is_within = length is None or len(positions) <= length
    yield is_within, f"{where}: is {length}, accepted positions reach {len(positions)}"


def _differ(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(a - b) > CLOSE * max(1.0, abs(a), abs(b))


@lru_cache
def _schema() -> dict[str, Any]:
    schema: dict[str, Any] = json.loads(Path(__file__).with_name("result.schema.json").read_text(encoding="utf-8"))
    return schema

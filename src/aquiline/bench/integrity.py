"""Whether a result's fields have their types and agree with each other: asked before a table or a gate believes them.

`result.problems` asks for a result's fields, its throughput and its tau. This asks the rest, of every field that is
shown or compared: first that it is of the kind that is computed with, last that what figures say twice is the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aquiline.bench.result import Result, problems, read_results
from aquiline.errors import ResultError

CLOSE = 1e-6
"""Relative difference of two ways to the same figure that rounding explains."""


@dataclass(frozen=True)
class Kind:
    """What fields of an object may hold, in words and as a test. A field may be missing where the schema says so."""

    owner: str
    fields: tuple[str, ...]
    words: str
    holds: Callable[[object], bool]


def _is_whole(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_number(value: object, least: float, most: float = math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


_TEXT = ("must be a text that is not empty", _is_text)
_TEXTS = ("must be a list of texts", lambda v: isinstance(v, list) and all(map(_is_text, v)))
_COUNT = ("must be a whole number, at least 0", _is_whole)
_SHARE = ("must be a number from 0 to 1", lambda v: _is_number(v, 0, 1))
_AMOUNT = ("must be a number above 0", lambda v: _is_number(v, math.ulp(0.0)))

KINDS = (
    Kind("", ("engine", "commit"), *_TEXT),
    Kind("", ("perf_violations",), *_TEXTS),
    Kind("scenario", ("name", "prompts_sha256"), *_TEXT),
    Kind("scenario", ("repeated_share",), *_SHARE),
    Kind("setting", ("name",), *_TEXT),
    Kind("setting", ("num_spec_tokens",), "must be null or at least 1", lambda v: v is None or _is_whole(v, 1)),
    Kind("model", ("target", "dtype", "arithmetic"), *_TEXT),
    Kind("model", ("draft",), "must be null or a text that is not empty", lambda v: v is None or _is_text(v)),
    Kind("model", ("simulated_tau",), "must be null or at least 1", lambda v: v is None or _is_number(v, 1)),
    Kind("output", ("sha256",), *_TEXT),
    Kind(
        "eagle_speculation",
        (
            "total_accepted_tokens", "total_draft_tokens", "num_drafts", "num_steps", "num_committed", "num_prefilled",
            "tokens_cut",
        ),
        *_COUNT,
    ),
    Kind("eagle_speculation", ("fraction_steps_accept_ge2",), *_SHARE),
    Kind("system", ("cpu", "isa", "path"), *_TEXT),
    Kind("system", ("threads",), "must be a whole number, at least 1", lambda v: _is_whole(v, 1)),
    Kind("slots", ("disabled_other",), *_COUNT),
    Kind("roofline", ("notes",), *_TEXTS),
    Kind("roofline", ("ideal_tokens_per_s", "percent_of_ideal", "ideal_speedup", "spec_efficiency"), *_AMOUNT),
)  # fmt: skip


def reasons(result: object) -> list[str]:
    """Why a result cannot be believed: `result.problems`, and what this module asks. Empty if it can."""
    found = [*_not_finite(result), *_not_of_kind(result)] or problems(result)
    if found or not isinstance(result, dict):
        return found
    return [*_output(result), *(_own(result) if result["engine"] == "aquiline" else ())]


def require(results: Mapping[str, Result]) -> None:
    """Raises ResultError naming each file that cannot be believed and why."""
    _refuse("results", [f"{name}: {reason}" for name, result in results.items() for reason in reasons(result)])


def read_sound(directory: Path) -> dict[str, Result]:
    """Every result of a directory by file name. Raises ResultError naming each file that is broken and why."""
    if not directory.is_dir():
        raise ResultError(f"{directory}: is no directory; name the one that `aquiline bench --out` wrote")
    broken = []
    for file in sorted(directory.glob("*.json")):
        try:
            parsed = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            broken.append(f"{file.name}: not JSON ({error})")
        else:
            broken += [f"{file.name}: {reason}" for reason in reasons(parsed)]
    _refuse(str(directory), broken)
    return read_results(directory)


def _not_finite(value: object, path: str = "") -> Iterator[str]:
    """Every number that is none, anywhere: JSON has no word for them, Python's reader takes them."""
    if isinstance(value, float) and not math.isfinite(value):
        yield f"{path}: {value} is not a finite number"
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _not_finite(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _not_finite(inner, f"{path}.{index}")


def _not_of_kind(result: object) -> Iterator[str]:
    if not isinstance(result, dict):
        return
    for kind in KINDS:
        owner = result.get(kind.owner) if kind.owner else result
        if not isinstance(owner, dict):
            continue
        for name in kind.fields:
            if name in owner and not kind.holds(owner[name]):
                yield f"{kind.owner}.{name}".lstrip(".") + f": is {owner[name]!r}, {kind.words}"


def _output(result: Result) -> Iterator[str]:
    scenario, num_tokens = result["scenario"], result["output"]["num_tokens"]
    asked = scenario["batch"] * scenario["measurement_runs"]
    if len(num_tokens) != asked:
        yield f"output.num_tokens: {len(num_tokens)} outputs, batch * measurement_runs is {asked}"
    elif max(num_tokens) > scenario["new_tokens"]:
        yield f"output.num_tokens: {max(num_tokens)} tokens, scenario.new_tokens is {scenario['new_tokens']}"


def _own(result: Result) -> list[str]:
    """What our own results say of the machine, and of the same thing twice. Other engines count as they do."""
    system, batch = result["system"], result["scenario"]["batch"]
    found = [f"system.{name}: is missing" for name in ("cpu", "threads", "isa", "path") if name not in system]
    latency, throughput = (result[name]["values"] for name in ("latency_ms_per_token", "throughput_tokens_per_sec"))
    expected = [batch / value * 1e3 for value in throughput]
    if len(latency) != len(expected) or any(map(_differ, latency, expected)):
        found.append("latency_ms_per_token: is not scenario.batch over throughput_tokens_per_sec, run by run")
    return found + _counters(result["eagle_speculation"], result["setting"])


def _counters(spec: Result, setting: Result) -> list[str]:
    """A step commits what it accepted and one more token of the target's, less what was cut."""
    found = []
    steps, drafted, accepted = spec["num_steps"], spec["total_draft_tokens"], spec["total_accepted_tokens"]
    if not steps:
        found.append("eagle_speculation.num_steps: is 0; nothing was decoded")
    if spec["num_committed"] + spec["tokens_cut"] != accepted + steps:
        found.append(
            f"eagle_speculation: total_accepted_tokens {accepted} + num_steps {steps} are not num_committed "
            f"{spec['num_committed']} + tokens_cut {spec['tokens_cut']}"
        )
    if setting["drafter"] != "none" and not drafted:
        found.append(f"eagle_speculation.total_draft_tokens: is 0 with setting.drafter {setting['drafter']!r}")
    if _differ(spec["mean_acceptance_rate"], accepted / drafted if drafted else 0.0):
        found.append(
            f"eagle_speculation.mean_acceptance_rate: is {spec['mean_acceptance_rate']}, total_accepted_tokens "
            f"{accepted} of total_draft_tokens {drafted}"
        )
    if _differ(sum(spec["per_position"]) * steps, accepted):
        found.append(
            f"eagle_speculation.per_position: in num_steps {steps} is not total_accepted_tokens {accepted} in all"
        )
    if spec["num_drafts"] != (steps if drafted else 0):
        found.append(
            f"eagle_speculation.num_drafts: is {spec['num_drafts']}, num_steps {steps} drafted {drafted} tokens"
        )
    if setting["drafter"] == "chain":
        longest = setting.get("num_spec_tokens")
        if longest is None:
            found.append("setting.num_spec_tokens: is missing; a chain has a length")
        elif len(spec["per_position"]) > longest:
            found.append(f"setting.num_spec_tokens: is {longest}, accepted positions reach {len(spec['per_position'])}")
    return found


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > CLOSE * max(1.0, abs(a), abs(b))


def _refuse(where: str, found: list[str]) -> None:
    if found:
        raise ResultError(f"{where}: refused\n" + "\n".join(f"  - {reason}" for reason in found))

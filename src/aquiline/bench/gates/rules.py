"""Gates as data: the figures that they may limit, the schema of their YAML, and limits from the command line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from aquiline.bench.results import speedups
from aquiline.bench.results.integrity import schema_problems
from aquiline.bench.results.result import Result
from aquiline.bench.results.speedups import Ratio
from aquiline.models.known_pairs import PAIRS

BUILT_IN = Path(__file__).with_name("gates.yaml")
LEVELS = ["micro", "full"]
FIGURES: dict[str, Callable[[Result, Ratio], float | None]] = {
    "speedup": lambda result, ratio: ratio.value,
    "tau": lambda result, ratio: result["eagle_speculation"]["mean_acceptance_length"],
    "steps": lambda result, ratio: min(result["output"]["num_tokens"]) - 1,
    "runs": lambda result, ratio: result["scenario"]["measurement_runs"],
    "acceptance_rate": lambda result, ratio: result["eagle_speculation"]["mean_acceptance_rate"],
    "tokens_per_s": lambda result, ratio: result["throughput_tokens_per_sec"]["median"],
    "ttft_ms": lambda result, ratio: result["ttft_ms"]["median"],
    "itl_ms": lambda result, ratio: result["itl_ms"]["median"],
    "peak_bytes": lambda result, ratio: result["memory"]["peak_bytes"],
    "repeated_share": lambda result, ratio: result["scenario"]["repeated_share"],
    "percent_of_ideal": lambda result, ratio: result.get("roofline", {}).get("percent_of_ideal"),
    "spec_efficiency": speedups.spec_efficiency,
}
"""What a limit may ask of a result and its speedup; None if it was not measured."""
GAP = "max_tau_gap"
"""How far tau may be from another engine's."""


def object_of(fields: dict[str, Any], *required: str) -> dict[str, Any]:
    """The JSON schema of an object with these fields and no others. Without names of required ones, all are."""
    names = [*fields]
    return {"type": "object", "properties": fields, "propertyNames": {"enum": names}, "required": [*required] or names}


TEXT = {"type": "string", "pattern": r"\S"}
COUNT = {"type": "integer", "minimum": 0}
LIMIT = {"type": "number", "exclusiveMinimum": 0}
SELECT = {
    "profile": {"enum": ["cpu", "full"]}, "scenario": TEXT, "context_tokens": COUNT, "batch": COUNT,
    "temperature": {"type": "number", "minimum": 0}, "setting": TEXT,
}  # fmt: skip
SIDES = {f"{side}_{figure}": LIMIT for figure in FIGURES for side in ("min", "max")}
LIMITS = object_of(SIDES | {GAP: LIMIT}, "min_speedup", "min_tau", "min_steps")
GATE = {
    "name": TEXT,
    "level": {"enum": LEVELS},
    "model": TEXT,
    "select": object_of(SELECT, "profile"),
    "limits": LIMITS,
}
SCHEMA = object_of(GATE)
"""The JSON schema of one gate."""


@dataclass(frozen=True)
class Gate:
    """Limits for the results of one model and piece of work. select: the fields of SELECT that its results have;
    changed: limits that do not come from the file."""

    name: str
    level: str
    model: str
    select: dict[str, Any]
    limits: dict[str, float]
    changed: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[str, str]:
        """Model and profile. Gates of one group are asked together."""
        return self.model, self.select["profile"]

    @property
    def work(self) -> str:
        """The selected work in words."""
        return ", ".join(f"{name} {self.select[name]}" for name in SELECT if name in self.select)

    def is_of(self, result: Result) -> bool:
        """Whether a result is of this gate's model and profile. Owners of hub names do not count."""
        target: str = result["model"]["target"]
        profile: str = result["scenario"]["profile"]
        return target.split("/")[-1] == self.model.split("/")[-1] and profile == self.select["profile"]

    def selects(self, result: Result) -> bool:
        """Whether a result is of this gate's model, work and setting."""
        s = result["scenario"]
        stated = s | {"scenario": s["name"], "setting": result["setting"]["name"]}
        return self.is_of(result) and all(stated[name] == value for name, value in self.select.items())

    @property
    def command(self) -> str:
        """A command that measures the gate's results, and perhaps others; the user puts in the draft's checkpoint."""
        select = self.select
        options = [f"--{name} {select[name]}" for name in ("profile", "scenario", "temperature") if name in select]
        length = select.get("setting", "").partition("chain-")[2]
        options += [f"--num-spec-tokens {length}"] if length else []
        options += [f"--target {self.model}", *([] if self.model in PAIRS else ["--draft DRAFT"])]
        return " ".join(["aquiline bench --out DIR", *options, f"--micro-steps {self.limits['min_steps']:.0f}"])


def read_gates(file: Path = BUILT_IN) -> list[Gate]:
    """The gates of a file. Raises ValueError naming the file, the gate and the field that is wrong."""
    try:
        parsed = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"gates={str(file)!r}: not YAML ({' '.join(str(error).split())})") from None
    entries = parsed.get("gates") if isinstance(parsed, dict) else None
    if not isinstance(entries, list) or not entries or list(parsed) != ["gates"]:
        raise ValueError(f"gates={str(file)!r}: needs one field, `gates`, a list of them")
    gates = []
    for entry in entries:
        name = entry.get("name", "a gate") if isinstance(entry, dict) else "a gate"
        _refuse(f"gates={str(file)!r}: {name}", schema_problems(entry, SCHEMA, "its fields"))
        limits = {limit: float(value) for limit, value in entry["limits"].items()}
        gates.append(Gate(**entry | {"limits": limits}))
    names = [gate.name for gate in gates]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"gates={str(file)!r}: name={', '.join(twice)}: stands twice")
    opened = {gate.group for gate in gates if gate.level == "micro"}
    closed = [gate.name for gate in gates if gate.group not in opened]
    if closed:
        raise ValueError(f"gates={str(file)!r}: {closed[0]}: needs a micro gate of its model and profile to open it")
    return gates


def override(gates: list[Gate], assignments: Iterable[str]) -> list[Gate]:
    """Gates with limits replaced by assignments NAME.LIMIT=VALUE. Raises ValueError for an assignment that is malformed
    or names no gate or limit."""
    found = {gate.name: gate for gate in gates}
    for assignment in assignments:
        left, equals, value = assignment.partition("=")
        name, dot, limit = left.rpartition(".")
        if not (equals and dot):
            raise ValueError(f"set={assignment!r}: must be NAME.LIMIT=VALUE, such as {gates[0].name}.min_tau=2.5")
        if name not in found:
            raise ValueError(f"set={assignment!r}: no gate {name!r}; there are {', '.join(found)}")
        gate = found[name]
        try:
            limits = gate.limits | {limit: float(value)}
        except ValueError as error:
            raise ValueError(f"set={assignment!r}: {error}") from None
        _refuse(f"set={assignment!r}", schema_problems(limits, LIMITS, "limits"))
        found[name] = replace(gate, limits=limits, changed=(*gate.changed, limit))
    return list(found.values())


def _refuse(where: str, reasons: list[str]) -> None:
    if reasons:
        raise ValueError(f"{where}: {'; '.join(reasons)}")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which a field that stands twice is an error: otherwise the stricter of two limits could be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found

"""Gates as data: read from YAML, checked, and overridden from the command line. Knows nothing of results' figures."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from aquiline.bench.results.result import Result
from aquiline.models.known_pairs import PAIRS

BUILT_IN = Path(__file__).with_name("gates.yaml")
LEVELS = ("micro", "full")
FIGURES = (
    "speedup", "tau", "steps", "runs", "acceptance_rate", "tokens_per_s", "ttft_ms", "itl_ms", "peak_bytes",
    "repeated_share", "percent_of_ideal", "spec_efficiency",
)  # fmt: skip
GAP = "max_tau_gap"
"""How far tau may be from another engine's."""
REQUIRED = ("min_speedup", "min_tau", "min_steps")
LIMITS = tuple(f"{side}_{figure}" for figure in FIGURES for side in ("min", "max")) + (GAP,)


@dataclass(frozen=True)
class Selector:
    """Which results of its model a gate judges; None accepts any value of a field."""

    profile: str
    scenario: str | None = None
    context_tokens: int | None = None
    batch: int | None = None
    temperature: float | None = None
    setting: str | None = None

    def takes(self, result: Result) -> bool:
        """Whether a result is of this work and setting."""
        s = result["scenario"]
        theirs = {
            "profile": s["profile"], "scenario": s["name"], "context_tokens": s["context_tokens"], "batch": s["batch"],
            "temperature": s["temperature"], "setting": result["setting"]["name"],
        }  # fmt: skip
        return all(value is None or theirs[name] == value for name, value in asdict(self).items())

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value is not None)


@dataclass(frozen=True)
class Gate:
    """Limits for the results of one model and piece of work. changed: limits that do not come from the file."""

    name: str
    level: str
    model: str
    select: Selector
    limits: dict[str, float]
    changed: tuple[str, ...] = ()

    @property
    def group(self) -> tuple[str, str]:
        """Model and profile. Gates of one group are asked together."""
        return self.model, self.select.profile

    def is_of(self, result: Result) -> bool:
        """Whether a result is of this gate's model and profile. Owners of hub names do not count."""
        target: str = result["model"]["target"]
        profile: str = result["scenario"]["profile"]
        return target.split("/")[-1] == self.model.split("/")[-1] and profile == self.select.profile

    @property
    def command(self) -> str:
        """A command that measures the gate's results, and perhaps others; the user puts in the draft's checkpoint."""
        s = self.select
        parts = [f"aquiline bench --out DIR --profile {s.profile}"]
        parts += [f"--scenario {s.scenario}"] if s.scenario is not None else []
        parts += [f"--temperature {s.temperature:g}"] if s.temperature is not None else []
        length = (s.setting or "").partition("chain-")[2]
        parts += [f"--num-spec-tokens {length}"] if length else []
        own = "" if self.model in PAIRS else " --draft DRAFT"
        parts += [f"--target {self.model}{own}"]
        return " ".join([*parts, f"--micro-steps {self.limits['min_steps']:.0f}"])


def read_gates(file: Path = BUILT_IN) -> list[Gate]:
    """The gates of a file. Raises ValueError naming the file, the gate and the field that is wrong."""
    try:
        parsed = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"gates={str(file)!r}: not YAML ({' '.join(str(error).split())})") from None
    entries = parsed.get("gates") if isinstance(parsed, dict) else None
    if not isinstance(entries, list) or not entries or list(parsed) != ["gates"]:
        raise ValueError(f"gates={str(file)!r}: needs one field, `gates`, a list of them")
    try:
        found = [_gate(entry) for entry in entries]
    except ValueError as error:
        raise ValueError(f"gates={str(file)!r}: {error}") from None
    names = [gate.name for gate in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"gates={str(file)!r}: name={', '.join(twice)}: stands twice")
    opened = {gate.group for gate in found if gate.level == "micro"}
    closed = [gate.name for gate in found if gate.group not in opened]
    if closed:
        raise ValueError(f"gates={str(file)!r}: {closed[0]}: needs a micro gate of its model and profile to open it")
    return found


def override(gates: list[Gate], assignments: list[str]) -> list[Gate]:
    """Gates with limits replaced by assignments NAME.LIMIT=VALUE. Raises ValueError for an assignment that is malformed
    or names no gate or limit."""
    for assignment in assignments:
        left, equals, value = assignment.partition("=")
        name, dot, limit = left.rpartition(".")
        if not (equals and dot):
            raise ValueError(f"set={assignment!r}: must be NAME.LIMIT=VALUE, such as {gates[0].name}.min_tau=2.5")
        if name not in {gate.name for gate in gates}:
            raise ValueError(f"set={assignment!r}: no gate {name!r}; there are {', '.join(g.name for g in gates)}")
        try:
            number = _limit(limit, float(value))
        except ValueError as error:
            raise ValueError(f"set={assignment!r}: {error}") from None
        gates = [
            replace(gate, limits=gate.limits | {limit: number}, changed=(*gate.changed, limit))
            if gate.name == name
            else gate
            for gate in gates
        ]
    return gates


def _gate(entry: object) -> Gate:
    if not isinstance(entry, dict):
        raise ValueError(f"gates: {entry!r} is no gate; give name, level, model, select and limits")
    name = _text(entry, "name", "a gate")
    known = ("name", "level", "model", "select", "limits")
    _only(entry, known, name)
    select, limits = entry.get("select"), entry.get("limits")
    if entry.get("level") not in LEVELS:
        raise ValueError(f"{name}: level={entry.get('level')!r}: must be one of {', '.join(LEVELS)}")
    if not isinstance(select, dict) or not isinstance(limits, dict):
        raise ValueError(f"{name}: select and limits must be given as fields with values")
    missing = [limit for limit in REQUIRED if limit not in limits]
    if missing:
        raise ValueError(f"{name}: limits.{missing[0]} is missing; a gate needs {', '.join(REQUIRED)}")
    try:
        checked = {limit: _limit(limit, value) for limit, value in limits.items()}
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return Gate(name, entry["level"], _text(entry, "model", name), _selector(select, name), checked)


def _selector(select: dict[Any, Any], gate: str) -> Selector:
    _only(select, tuple(field.name for field in fields(Selector)), gate)
    if select.get("profile") not in ("cpu", "full"):
        raise ValueError(f"{gate}: select.profile={select.get('profile')!r}: must be cpu or full")
    for name in ("scenario", "setting"):
        if name in select:
            _text(select, name, f"{gate}: select")
    for name, kind in (("context_tokens", int), ("batch", int), ("temperature", (int, float))):
        value = select.get(name, 1)
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise ValueError(f"{gate}: select.{name}={value!r}: must be a number, 0 or more; a count is whole")
    return Selector(**select)


def _limit(name: str, value: object) -> float:
    if name not in LIMITS:
        raise ValueError(f"limits.{name}: is no limit; there are {', '.join(LIMITS)}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"limits.{name}={value!r}: must be a number above 0, or nothing would be asked")
    return float(value)


def _text(entry: dict[Any, Any], field: str, where: str) -> str:
    value = entry.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {field}={value!r}: must be a text that is not empty")
    return value


def _only(entry: dict[Any, Any], known: tuple[str, ...], where: str) -> None:
    unknown = [str(field) for field in entry if field not in known]
    if unknown:
        raise ValueError(f"{where}: unknown field {', '.join(unknown)}; there are {', '.join(known)}")


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML in which a field that stands twice is an error: otherwise the stricter of two limits could be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found

"""Gates as data: reading them from YAML by the schema of gates.schema.json, and limits from the command line."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from aquiline.bench.results.integrity import schema_problems
from aquiline.bench.results.result import Result
from aquiline.bench.results.speedups import FIGURES
from aquiline.models.known_pairs import PAIRS

BUILT_IN = Path(__file__).with_name("gates.yaml")
SCHEMA = json.loads(BUILT_IN.with_name("gates.schema.json").read_text(encoding="utf-8"))
LEVELS = SCHEMA["properties"]["level"]["enum"]
GAP = "max_tau_gap"
"""The limit of how far tau may be from another engine's."""
LIMITS = SCHEMA["properties"]["limits"]
LIMITS["propertyNames"] = {"enum": [*(f"{side}_{figure}" for figure in FIGURES for side in ("min", "max")), GAP]}


@dataclass(frozen=True)
class Gate:
    """Limits for the results of one model and piece of work. select: the fields that its results have; changed: limits
    that do not come from the file."""

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
        names = SCHEMA["properties"]["select"]["properties"]
        return ", ".join(f"{name} {self.select[name]}" for name in names if name in self.select)

    def selects(self, result: Result, *fields: str) -> bool:
        """Whether a result is of this gate's model, and has the fields that it selects, or those of them named here.
        Owners of hub names do not count."""
        stated = result["scenario"] | {"scenario": result["scenario"]["name"], "setting": result["setting"]["name"]}
        is_of_model = result["model"]["target"].split("/")[-1] == self.model.split("/")[-1]
        return is_of_model and all(stated[name] == self.select[name] for name in fields or self.select)

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
    where = f"gates={str(file)!r}"
    try:
        parsed = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}: not YAML ({' '.join(str(error).split())})") from None
    entries = parsed.get("gates") if isinstance(parsed, dict) else None
    if not isinstance(entries, list) or not entries or list(parsed) != ["gates"]:
        raise ValueError(f"{where}: needs one field, `gates`, a list of them")
    for entry in entries:
        name = entry.get("name", "a gate") if isinstance(entry, dict) else "a gate"
        _refuse(f"{where}: {name}", schema_problems(entry, SCHEMA, "its fields"))
    gates = [Gate(**entry | {"limits": {k: float(v) for k, v in entry["limits"].items()}}) for entry in entries]
    names, opened = [gate.name for gate in gates], {gate.group for gate in gates if gate.level == "micro"}
    twice = sorted({name for name in names if names.count(name) > 1})
    _refuse(f"{where}: name={', '.join(twice)}", ["stands twice"] if twice else [])
    closed = next((gate.name for gate in gates if gate.group not in opened), None)
    _refuse(f"{where}: {closed}", ["needs a micro gate of its model and profile to open it"] if closed else [])
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
        try:
            limits = found[name].limits | {limit: float(value)}
        except ValueError as error:
            raise ValueError(f"set={assignment!r}: {error}") from None
        _refuse(f"set={assignment!r}", schema_problems(limits, LIMITS, "limits"))
        found[name] = replace(found[name], limits=limits, changed=(*found[name].changed, limit))
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

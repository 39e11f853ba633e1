"""Gates as data: those in the package, files of one's own, limits from the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gates import GATES, MICRO

from aquiline.bench.gates.rules import override, read_gates


def test_the_gates_in_the_package() -> None:
    gates = {gate.name: gate for gate in read_gates()}
    single, batch = gates["micro-32k-single"], gates["micro-16k-batch-4"]
    assert (single.select["context_tokens"], single.select["batch"]) == (32768, 1)
    assert (batch.select["context_tokens"], batch.select["batch"]) == (16384, 4)
    assert {k: single.limits[k] for k in ("min_speedup", "min_tau", "min_steps")} == {
        "min_speedup": 2.0, "min_tau": 3.0, "min_steps": 512
    }  # fmt: skip
    assert {k: batch.limits[k] for k in ("min_speedup", "min_tau", "min_steps")} == {
        "min_speedup": 1.0, "min_tau": 2.2, "min_steps": 128
    }  # fmt: skip
    for gate in gates.values():
        assert "max_tau_gap" in gate.limits and "temperature" in gate.select
    assert {gate.group for gate in gates.values() if gate.level == "full"} == {gate.group for gate in gates.values()}


ENTRY = """gates:
  - name: a
    level: micro
    model: bundled
    select: {profile: cpu, batch: 1}
    limits: {min_speedup: 1.5, min_tau: 2, min_steps: 8}
"""


def edited(old: str, new: str) -> str:
    assert old in ENTRY
    return ENTRY.replace(old, new)


BAD_FILES = {
    "no YAML": ("gates: [", "not YAML"),
    "no gates": ("gates: []", "needs one field, `gates`"),
    "a list": ("- a", "needs one field, `gates`"),
    "more than gates": (ENTRY + "limits: {}\n", "needs one field, `gates`"),
    "a gate that is none": ("gates: [5]", "a gate: its fields: 5 is not of type 'object'"),
    "no name": (edited("name: a", "name: 7"), "name: 7 is not of type 'string'"),
    "an unknown field": (
        edited("level: micro", "level: micro\n    leevl: micro"),
        "a: its fields: 'leevl' is not one of .*'level'",
    ),
    "an unknown level": (
        edited("level: micro", "level: mikro"),
        r"a: level: 'mikro' is not one of \['micro', 'full'\]",
    ),
    "an unknown limit": (
        edited("min_tau: 2", "min_tau: 2, min_tua: 3"),
        "a: limits: 'min_tua' is not one of .*'min_tau'",
    ),
    "a limit that asks nothing": (
        edited("min_tau: 2", "min_tau: 0"),
        "a: limits.min_tau: 0 is less than or equal to the minimum of 0",
    ),
    "a limit in words": (edited("min_tau: 2", "min_tau: two"), "a: limits.min_tau: 'two' is not of type 'number'"),
    "a limit that is none": (edited("min_tau: 2", "min_tau: .nan"), "a: limits.min_tau: nan is not a finite number"),
    "a limit too few": (edited("min_tau: 2, ", ""), "a: limits: 'min_tau' is a required property"),
    "a limit twice": (edited("min_tau: 2", "min_tau: 2, min_tau: 1"), "not YAML .*'min_tau' stands twice"),
    "an unknown profile": (
        edited("profile: cpu", "profile: gpu"),
        r"a: select.profile: 'gpu' is not one of \['cpu', 'full'\]",
    ),
    "an unknown selector": (edited("batch: 1", "batches: 1"), "a: select: 'batches' is not one of .*'batch'"),
    "half a sequence": (edited("batch: 1", "batch: 1.5"), "a: select.batch: 1.5 is not of type 'integer'"),
    "a name twice": (ENTRY + ENTRY.removeprefix("gates:\n"), "name=a: stands twice"),
    "nothing to open it": (edited("level: micro", "level: full"), "a: needs a micro gate of its model and profile"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_of_gates_is_refused(name: str, tmp_path: Path) -> None:
    content, reason = BAD_FILES[name]
    file = tmp_path / "mine.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=rf"gates='.*mine\.yaml': .*{reason}"):
        read_gates(file)
    file.write_text(ENTRY)
    assert [gate.name for gate in read_gates(file)] == ["a"]


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("micro.min_tau", "must be NAME.LIMIT=VALUE"),
        ("min_tau=2", "must be NAME.LIMIT=VALUE"),
        ("mikro.min_tau=2", "no gate 'mikro'; there are micro, full, large"),
        ("micro.tau=2", "limits: 'tau' is not one of .*'min_tau'"),
        ("micro.min_tau=two", "could not convert string to float: 'two'"),
        ("micro.min_tau=0", "min_tau: 0.0 is less than or equal to the minimum of 0"),
        ("micro.min_tau=inf", "min_tau: inf is not a finite number"),
    ],
)
def test_a_bad_assignment_is_refused(assignment: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"set='{assignment}': .*{reason}"):
        override(GATES, [assignment])
    assert override(GATES, ["micro.min_tau=2.5"])[0].limits["min_tau"] == 2.5 and MICRO.limits["min_tau"] == 1.2

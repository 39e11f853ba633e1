"""Which results are shown together: sections of comparable runs, series of one setting, and each result's baseline.

A section is one machine, target and way to compute, as `speedups.machine` and `speedups.model` state them. Peers on the
same machine, target and sampling are shown beside aquiline as series of their own; without a result of aquiline each
peer has a section. `speedups.speedup` computes ratios.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from aquiline.bench.results import speedups
from aquiline.bench.results.result import Result, is_speculative
from aquiline.spec.registry import DRAFTINGS

OWN = "aquiline"


@dataclass(frozen=True)
class ReportRow:
    """One result. label: the name of its series, the same in every scenario. variant: the part of the label that names
    engine and draft. scenario: the title of its scenario. style: the number of its series' look, -1 for our baseline.
    ratio: its speedup, or why there is none. over: of adaptive drafting, its throughput over that of each fixed setting
    of the same scenario, by label."""

    file: str
    result: Result
    label: str
    variant: str
    scenario: str
    style: int
    ratio: speedups.Ratio
    over: dict[str, speedups.Ratio]

    def part(self, name: str) -> dict[str, Any]:
        """An object of the result that not every result has, as `adaptive`; empty without it."""
        return dict(self.result.get(name, {}))

    @property
    def stage_ms(self) -> dict[str, float]:
        """Milliseconds of a decode step by stage, without stages that took no time."""
        return {name: ms for name, ms in self.result["stage_ms"].items() if ms}


@dataclass(frozen=True)
class Section:
    """Rows by scenario, shortest context and smallest batch first. older: files that a newer run replaces, with their
    dates."""

    title: str
    about: str
    rows: list[ReportRow]
    older: list[str]

    @property
    def notes(self) -> list[str]:
        """The roofline's notes on its ideals, each once."""
        return list(dict.fromkeys(note for row in self.rows for note in row.part("roofline").get("notes", ())))

    @property
    def remarks(self) -> list[str]:
        """The speedups and files that are not shown, with the reason."""
        ratios = [(row.file, row.ratio) for row in self.rows if row.ratio.value is None]
        said = [f"{file}: no speedup: {'; '.join(ratio.reasons)}" for file, ratio in ratios]
        return said + [f"{name}: not shown, a newer run of the same is" for name in self.older]


def by_scenario(rows: list[ReportRow]) -> list[tuple[str, list[ReportRow]]]:
    """The rows of each scenario."""
    return [(name, list(group)) for name, group in groupby(rows, key=lambda row: row.scenario)]


def sections(results: dict[str, Result]) -> list[Section]:
    """The sections of all results. A peer's result is in every section whose work it shares."""
    own: defaultdict[tuple[Any, ...], dict[str, Result]] = defaultdict(dict)
    peers: defaultdict[tuple[Any, ...], dict[str, Result]] = defaultdict(dict)
    for file, result in results.items():
        work, way = _work(result), (speedups.model(result), speedups.machine(result))
        group = own[work, way] if result["engine"] == OWN else peers[work]
        group[file] = result
    found = [_section(group | peers.get(work, {})) for (work, _), group in sorted(own.items())]
    joined = {work for work, _ in own}
    for work, group in sorted(peers.items()):
        for engine in sorted({result["engine"] for result in group.values()} if work not in joined else ()):
            found.append(_section({file: r for file, r in group.items() if r["engine"] == engine}))
    return found


def badges(rows: list[ReportRow]) -> list[str]:
    """The facts about these rows that limit the meaning of their figures."""
    models = [row.result["model"] for row in rows]
    found = {
        "CPU profile": any(row.result["scenario"]["profile"] == "cpu" for row in rows),
        "random weights": any(model["random_weights"] for model in models),
        "simulated tau": any(model["simulated_tau"] is not None for model in models),
    }
    return [name for name, is_there in found.items() if is_there]


def amount(tokens: int) -> str:
    """A number of tokens or sequences: 8K is 8192."""
    return f"{tokens // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"


def _work(result: Result) -> tuple[str, ...]:
    """The facts that results of different engines must share to be plotted together."""
    scenario, model, system = result["scenario"], result["model"], result["system"]
    return (
        scenario["profile"], str(system.get("cpu")), str(system.get("threads")), model["target"],
        str(model["random_weights"]), f"{scenario['temperature']:g}",
    )  # fmt: skip


def _section(group: dict[str, Result]) -> Section:
    """One section: its rows in order. Of several results of one setting and scenario, only the newest has a row."""
    variants = {file: _variant(result, group) for file, result in group.items()}
    labels = {file: _label(result, variants[file]) for file, result in group.items()}
    newest = {}
    for file in sorted(group, key=lambda file: str(group[file]["date"])):
        newest[_asked(group[file]), labels[file]] = file
    files = sorted(newest.values(), key=lambda file: (_place(group[file]), _rank(group[file], labels[file])))
    shown = {file: group[file] for file in files}
    styles, scenarios = _styles(group, labels), _scenarios(shown)
    rows = [
        ReportRow(
            file, result, labels[file], variants[file], scenarios[_asked(result)], styles[labels[file]],
            speedups.speedup(result, shown), _over(result, shown, labels),
        )
        for file, result in shown.items()
    ]  # fmt: skip
    first = shown[files[0]]
    model, temperature = first["model"], first["scenario"]["temperature"]
    engine, sampling = "" if first["engine"] == OWN else f"{first['engine']}, ", f"temperature {temperature:g}"
    return Section(
        f"{speedups.machine(first)}: {engine}{model['target']}",
        f"{model['dtype']} storage, {model['arithmetic']} arithmetic, {sampling if temperature else 'greedy'}",
        rows, [f"{file} ({group[file]['date']})" for file in group if file not in shown],
    )  # fmt: skip


def _over(result: Result, shown: dict[str, Result], labels: dict[str, str]) -> dict[str, speedups.Ratio]:
    """The ratios of an adaptive setting to the fixed ones of its scenario, as far as they may be compared."""
    ratios = {
        labels[file]: speedups.over_setting(result, other)
        for file, other in shown.items()
        if result.get("adaptive") and other["engine"] == OWN and not other.get("adaptive")
        if _asked(other) == _asked(result)
    }
    return {label: ratio for label, ratio in ratios.items() if ratio.value is not None}


def _styles(group: dict[str, Result], labels: dict[str, str]) -> dict[str, int]:
    """The style of each label: -1 for our baseline, then the styles in turn."""
    order = sorted(group, key=lambda file: _rank(group[file], labels[file]))
    plain = {labels[file] for file in order if not is_speculative(group[file]) and group[file]["engine"] == OWN}
    rest = dict.fromkeys(labels[file] for file in order if labels[file] not in plain)
    return dict.fromkeys(plain, -1) | {label: index for index, label in enumerate(rest)}


def _variant(result: Result, group: dict[str, Result]) -> str:
    """The words that tell this result's engine and draft apart from the others of a group."""
    model, name = result["model"], result["engine"]
    drafts = {r["model"]["draft"] for r in group.values() if r["engine"] == name and is_speculative(r)}
    engine = [f"{name} ({model['dtype']})"] if name != OWN else []
    return ", ".join(engine + ([f"draft {model['draft']}"] if len(drafts) > 1 and is_speculative(result) else []))


def _label(result: Result, variant: str) -> str:
    """The label of a result: its variant and setting, with the setting's size if the name lacks it."""
    setting, tau = result["setting"], result["model"]["simulated_tau"]
    label = f"{variant}: {setting['name']}" if variant else str(setting["name"])
    length = setting.get("num_spec_tokens")
    letter, size = ("N", setting.get("max_nodes")) if length is None else ("K", length)
    if size is not None and is_speculative(result) and str(size) not in re.findall(r"\d+", str(setting["name"])):
        label += f" {letter}={size}"
    return label if tau is None else f"{label}, simulated tau {tau:g}"


def _asked(result: Result) -> tuple[object, ...]:
    """The fields of a scenario that `differences` compares and that a section does not share."""
    names = ("context_tokens", "batch", "name", "new_tokens", "seed", "prompts_sha256")
    return tuple(result["scenario"][name] for name in names)


def _place(result: Result) -> tuple[object, ...]:
    """Order of scenarios."""
    context, batch, *rest = _asked(result)
    return context, batch, *map(str, rest)


def _scenarios(group: dict[str, Result]) -> dict[tuple[object, ...], str]:
    """A title for each scenario. Seed and prompts are named only if two titles would be equal without them."""
    titles = {}
    for s in (result["scenario"] for result in group.values()):
        about = f"context {amount(s['context_tokens'])}, batch {s['batch']}, {amount(s['new_tokens'])} new tokens"
        titles[_asked({"scenario": s})] = f"{s['name']}: {about}"
    often = Counter(titles.values())
    return {
        asked: title if often[title] == 1 else f"{title}, seed {asked[4]}, prompts {str(asked[5])[:8]}"
        for asked, title in titles.items()
    }


def _rank(result: Result, label: str) -> tuple[object, ...]:
    """Order of series: aquiline first, no drafter first, then drafters by kind and length."""
    setting, engine = result["setting"], result["engine"]
    kind = [*DRAFTINGS, setting["drafter"]].index(setting["drafter"])
    return engine != OWN, engine, kind, setting.get("num_spec_tokens") or 0, label

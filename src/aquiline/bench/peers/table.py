"""Comparisons as one small table, as README shows them: what both sides could do at best, with the settings named.

A directory of results per comparison, as `aquiline compare --out` writes them. In each line stands the fastest of so
many settings on either side; it is found on the rounds that it is judged by, which flatters both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aquiline.bench.peers.base import QUANTISED
from aquiline.bench.results.intervals import Estimate, estimate, paired
from aquiline.bench.results.result import Result, is_speculative, read_results, require_published

COLUMNS = ("run", "what", "aquiline: fastest of", "tok/s", "peers: fastest of", "tok/s", "aquiline over it")
Chooser = Callable[[Result], bool]


def _rounded(result: Result) -> bool:
    return result["model"]["dtype"] in QUANTISED


def _stored(dtype: str) -> Chooser:
    return lambda r: not is_speculative(r) and r["model"]["dtype"] == dtype


LINES: dict[str, tuple[Chooser, Chooser]] = {
    "plain decoding": (lambda r: not is_speculative(r) and not _rounded(r),) * 2,
    "int8 weights": (_stored("int8"),) * 2,
    "int4 weights": (_stored("int4"),) * 2,
    "with the same EAGLE-3 draft": (
        lambda r: is_speculative(r) and r["model"]["draft"] is not None and not _rounded(r),
    ) * 2,
    "our best, their lookup in the text": (
        lambda r: not _rounded(r), lambda r: is_speculative(r) and r["model"]["draft"] is None and not _rounded(r),
    ),
}  # fmt: skip
"""What stands in a line: ours and theirs. int8 and int4 of one engine are rounded otherwise than another's."""


def read_comparisons(root: Path) -> dict[str, dict[str, Result]]:
    """The results of every directory in root, by its name. Raises ResultError for what cannot be believed."""
    return {found.name: read_results(found) for found in sorted(root.iterdir()) if found.is_dir()}


def short(comparisons: Mapping[str, Mapping[str, Result]]) -> str:
    """Markdown: the table, then what flash attention does to llama.cpp, then who was left out and why.

    Raises ResultError naming the results of uncommitted changes: such a table is for publishing."""
    for results in comparisons.values():
        require_published(results)
    rows = [row for results in comparisons.values() for row in _rows(list(results.values()))]
    table = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    lines = [f"| {' | '.join(line)} |" for line in table]
    return "\n".join([*lines, "", *_notes(comparisons)]) + "\n"


def _rows(results: list[Result]) -> list[list[str]]:
    fair = [r for r in results if not r.get("void")]
    own, others = ([r for r in fair if (r["engine"] == "aquiline") == is_own] for is_own in (True, False))
    rows = []
    for what, (ours, theirs) in LINES.items():
        left, right = [r for r in own if ours(r)], [r for r in others if theirs(r)]
        if left and right:
            best, other = max(left, key=_median), max(right, key=_median)
            ratio = paired(_values(best), _values(other))
            rows.append([_run(best), what, *_named(best, left), *_named(other, right), ratio.times()])
    return rows


def _run(result: Result) -> str:
    """Model, temperature and how many at once."""
    s = result["scenario"]
    heat = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    return f"{result['model']['target']}, {heat}" + (f", {s['batch']} at once" if s["batch"] > 1 else "")


def _named(best: Result, among: list[Result]) -> tuple[str, str]:
    return f"{len(among)}: {best['setting']['name']}", _rate(best).whole()


def _notes(comparisons: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Flash attention with and without, setting by setting; settings that are void."""
    notes = []
    for results in comparisons.values():
        by_name = {r["setting"]["name"]: r for r in results.values()}
        said = []
        for name, off in by_name.items():
            on = by_name.get(name.removesuffix(" noflash"))
            if on is not None and on is not off:
                said.append(f"{on['setting']['name']} {_rate(on).whole()} with, {_rate(off).whole()} without")
        run = _run(next(iter(results.values())))
        notes += [f"- {run}: flash attention of llama.cpp, tok/s: {'; '.join(said)}."] if said else []
        notes += [f"- {run}: {r['setting']['name']} is void: {r['void']}." for r in results.values() if r.get("void")]
    return notes


def _values(result: Result) -> list[float]:
    found: list[float] = result["throughput_tokens_per_sec"]["values"]
    return found


def _rate(result: Result) -> Estimate:
    return estimate(_values(result))


def _median(result: Result) -> float:
    return _rate(result).value

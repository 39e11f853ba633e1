"""Comparisons as one small table, as in docs/results.md: the best setting of both sides, by name.

Reads one directory of results per comparison, as `aquiline compare --out` writes them. Each line names the fastest
setting of either side and how many settings it was chosen from. It is chosen on the same rounds that it is judged by,
which flatters both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aquiline.bench.peers.base import is_rounded
from aquiline.bench.results.intervals import Estimate, estimate, paired
from aquiline.bench.results.result import Result, is_speculative, read_results, require_published
from aquiline.blocks import is_packed

COLUMNS = ("run", "what", "aquiline: fastest of", "tok/s", "peers: fastest of", "tok/s", "aquiline over it")
Chooser = Callable[[Result], bool]


def _whole(result: Result) -> bool:
    return not is_rounded(result["model"]["dtype"])


def _packed(result: Result) -> bool:
    return is_packed(result["model"]["dtype"])


def _stored(dtype: str) -> Chooser:
    return lambda r: r["model"]["dtype"] == dtype


def _plain(among: Chooser) -> Chooser:
    return lambda r: among(r) and not is_speculative(r)


def _drafted(among: Chooser) -> Chooser:
    return lambda r: among(r) and is_speculative(r) and r["model"]["draft"] is not None


def _lookup(among: Chooser) -> Chooser:
    return lambda r: among(r) and is_speculative(r) and r["model"]["draft"] is None


LINES: dict[str, tuple[Chooser, Chooser]] = {
    "plain decoding": (_plain(_whole),) * 2,
    "int8 weights": (_plain(_stored("int8")),) * 2,
    "int4 weights": (_plain(_stored("int4")),) * 2,
    "with the same EAGLE-3 draft": (_drafted(_whole),) * 2,
    "our best, their lookup in the text": (_whole, _lookup(_whole)),
    "the same GGUF file": (_plain(_packed),) * 2,
    "the same GGUF file and EAGLE-3 draft": (_drafted(_packed),) * 2,
    "the same GGUF file: our best, their lookup in the text": (_packed, _lookup(_packed)),
}
"""The lines of the table, each with two choosers: of our settings and of the peers'. Engines differ in how they round
int8 and int4 weights; a GGUF file's blocks are the same for all."""


def read_comparisons(root: Path) -> dict[str, dict[str, Result]]:
    """The results of every directory in root, by its name. Raises ResultError for results that cannot be believed."""
    return {found.name: read_results(found) for found in sorted(root.iterdir()) if found.is_dir()}


def short(comparisons: Mapping[str, Mapping[str, Result]]) -> str:
    """Markdown: the table, then llama.cpp with and without flash attention, then the void settings with reasons.

    Raises ResultError naming results of uncommitted changes, since this table is for publishing."""
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
    """The run in words: model, temperature and how many prompts run at once."""
    s = result["scenario"]
    heat = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    return f"{result['model']['target']}, {heat}" + (f", {s['batch']} at once" if s["batch"] > 1 else "")


def _named(best: Result, among: list[Result]) -> tuple[str, str]:
    return f"{len(among)}: {best['setting']['name']}", _rate(best).whole()


def _notes(comparisons: Mapping[str, Mapping[str, Result]]) -> list[str]:
    """Notes below the table: llama.cpp's settings with and without flash attention, and settings that are void."""
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

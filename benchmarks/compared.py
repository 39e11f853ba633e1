"""Comparisons as one small table for readers: the best setting of both sides, by name.

Reads one directory of results per comparison, as `aquiline compare --out` writes them. Each row names the fastest
setting of either side and how many settings it was chosen from. It is chosen on the same rounds that it is judged by,
which flatters both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from aquiline.bench.peers.names import QUANTISED
from aquiline.bench.peers.verdict import Standing, fastest, standing_of
from aquiline.bench.results.result import Result, is_speculative, read_results, require_published
from aquiline.bench.tables import Table
from aquiline.blocks import PACKED, is_packed

COLUMNS = ("run", "what", "aquiline: fastest of", "tok/s", "peers: fastest of", "tok/s", "aquiline over it")
FLOATS = "floats"
PLAIN, HEAD, LOOKUP = "plain", "head", "lookup"
ANY = (PLAIN, HEAD, LOOKUP)
LINES = (
    ("plain decoding", FLOATS, (PLAIN,), (PLAIN,)),
    ("int8 weights", "int8", (PLAIN,), (PLAIN,)),
    ("int4 weights", "int4", (PLAIN,), (PLAIN,)),
    ("with the same EAGLE-3 draft", FLOATS, (HEAD,), (HEAD,)),
    ("our best, their lookup in the text", FLOATS, ANY, (LOOKUP,)),
    ("the same GGUF file", PACKED, (PLAIN,), (PLAIN,)),
    ("the same GGUF file and EAGLE-3 draft", PACKED, (HEAD,), (HEAD,)),
    ("the same GGUF file: our best, their lookup in the text", PACKED, ANY, (LOOKUP,)),
)
"""The rows of each comparison: name, storage of weights, our ways to draft and the peers'. Engines differ in how they
round int8 and int4 weights; a GGUF file's blocks are the same for all."""


def read_comparisons(root: Path) -> dict[str, dict[str, Result]]:
    """The results of every directory in root, by its name. Raises ResultError for results that cannot be believed."""
    return {found.name: read_results(found) for found in sorted(root.iterdir()) if found.is_dir()}


def published(comparisons: Mapping[str, Mapping[str, Result]]) -> Table:
    """The table; its notes are llama.cpp with and without flash attention, and the void settings with reasons.

    Raises ResultError naming results of uncommitted changes, since this table is for publishing."""
    rows, notes = [], []
    for results in comparisons.values():
        require_published(results)
        run = _run(next(iter(results.values())))
        rows += [[run, *row] for row in _rows(list(results.values()))]
        notes += [f"{run}: {note}." for note in _notes(list(results.values()))]
    return Table(COLUMNS, rows, notes=notes)


def _run(result: Result) -> str:
    """The run in words: model, temperature and how many prompts run at once."""
    s = result["scenario"]
    heat = "greedy" if s["temperature"] == 0 else f"temperature {s['temperature']:g}"
    return f"{result['model']['target']}, {heat}" + (f", {s['batch']} at once" if s["batch"] > 1 else "")


def _kind(result: Result) -> tuple[str, str]:
    """How a result's weights are stored, and how it drafts."""
    dtype = result["model"]["dtype"]
    storage = PACKED if is_packed(dtype) else dtype if dtype in QUANTISED else FLOATS
    drafting = HEAD if result["model"]["draft"] is not None else LOOKUP
    return storage, drafting if is_speculative(result) else PLAIN


def _rows(results: list[Result]) -> list[list[str]]:
    fair = [(_kind(r), standing_of(r)) for r in results if not r.get("void")]
    rows = []
    for what, storage, ours, theirs in LINES:
        alike = [(drafting, standing) for (stored, drafting), standing in fair if stored == storage]
        own = [s for drafting, s in alike if s.is_own and drafting in ours]
        others = [s for drafting, s in alike if not s.is_own and drafting in theirs]
        if own and others:
            ratio = fastest(own).over(fastest(others))
            rows.append([what, *_named(own), *_named(others), ratio.times()])
    return rows


def _named(among: list[Standing]) -> tuple[str, str]:
    best = fastest(among)
    return f"{len(among)}: {best.label.removeprefix('aquiline ')}", best.rate.whole()


def _notes(results: list[Result]) -> list[str]:
    """llama.cpp's settings with and without flash attention, and the settings that are void."""
    standings = [standing_of(result) for result in results]
    by_label = {standing.label: standing for standing in standings}
    said = []
    for label, off in by_label.items():
        on = by_label.get(label.removesuffix(" noflash"))
        if on is not None and on is not off:
            said.append(f"{on.label} {on.rate.whole()} with, {off.rate.whole()} without")
    flash = [f"flash attention of llama.cpp, tok/s: {'; '.join(said)}"] if said else []
    return flash + [f"{s.label.removeprefix('aquiline ')} is void: {s.void}" for s in standings if s.void]

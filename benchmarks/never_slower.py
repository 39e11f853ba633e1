"""Is adaptive drafting ever slower than a fixed setting? The cells of cells.json, one after the other.

In each cell all settings of turns.py take turns of 32 steps on the same running sequences: plain, chains of 1, 2, 3 and
5, a tree of 6 nodes, and adaptive drafting, which keeps what it has learnt between its turns and first learns alone for
half as long as is measured. In a round all of them continue the same texts, in an order that is drawn anew. Ratios are
paired by round: medians with intervals that hold them with a chance of 95 % or more. A cell passes if the lower end
lies above 0.98 over plain and above 0.97 over the best fixed setting, the one of the most tokens per second in the same
run, which favours it.

Plain turns run in requests that may draft, so they still keep the target's features for the draft. Where plain turns
are the fastest, `--against-none` compares adaptive requests with requests that never draft, in an engine of their own
beside the other: this holds all that adaptive drafting costs where it is of no use. At most 0.7 % passes.

Texts: "library" is held-out Python source, "documents" this repository's prose, "chat" such prose and a question about
it. The bundled pair was trained on source, the draft of SmolLM2 on chats; what is not their own is hard. A context of
8192 tokens leaves 1,024 of them for the output. Prompts are computed once, and served from the prefix cache.

Prints a line for every cell, and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from turns import ADAPTIVE, FIXED, SETTINGS, Texts, Turn, Turns, open_llm, prompts_of, take_turn

from aquiline.bench.results.intervals import LEAST_RUNS, Estimate, paired
from aquiline.bench.results.result import commit
from aquiline.engine.control.controller import PLAIN
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import NoDraft

CELLS = Path(__file__).with_name("cells.json")
OVER_PLAIN, OVER_BEST, COST = 0.98, 0.97, 0.007
ROOM = 2048
"""Tokens of output that a sequence has at most before it begins anew."""
LEAST_ROOM = 1024


def in_turns(texts: Texts, seconds: float) -> dict[str, list[Turn]]:
    """Rounds of all settings for so long."""
    order, rng = list(SETTINGS), random.Random(0)
    found: dict[str, list[Turn]] = {name: [] for name in SETTINGS}
    for name in SETTINGS:  # warms up
        take_turn(texts.llm, name)
    learnt = time.perf_counter() + seconds / 2
    while time.perf_counter() < learnt:
        texts.next_round()
        texts.go_back()
        take_turn(texts.llm, ADAPTIVE)
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(found[ADAPTIVE]) < LEAST_RUNS:
        texts.next_round()
        rng.shuffle(order)
        for name in order:
            texts.go_back()
            found[name].append(take_turn(texts.llm, name))
    return found


def against_none(texts: Texts, seconds: float) -> Estimate:
    """Tokens per second of adaptive requests, over those of requests that never draft."""
    llm = LLM.from_models(texts.llm.models, texts.llm.engine.config, NoDraft())
    llm.engine.controller = Turns(llm)
    pair = {ADAPTIVE: texts, "none": Texts(llm, texts.prompts, texts.temperature, NoDraft())}
    rates: dict[str, list[float]] = {name: [] for name in pair}
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or len(rates["none"]) <= LEAST_RUNS:
        for name in (ADAPTIVE, "none") if len(rates["none"]) % 2 else ("none", ADAPTIVE):
            pair[name].next_round()
            pair[name].go_back()
            rates[name].append(take_turn(pair[name].llm, ADAPTIVE if name == ADAPTIVE else PLAIN.label).rate)
    llm.close()
    return paired(rates[ADAPTIVE][1:], rates["none"][1:])


def measure(cell: dict[str, object], texts: Texts, seconds: float) -> dict[str, object]:
    """One cell in turns."""
    found = in_turns(texts, seconds)
    rates = {name: sum(t.tokens for t in turns) / sum(t.seconds for t in turns) for name, turns in found.items()}
    best = max(FIXED, key=rates.__getitem__)
    each = {name: [turn.rate for turn in turns] for name, turns in found.items()}
    over_plain, over_best = paired(each[ADAPTIVE], each[PLAIN.label]), paired(each[ADAPTIVE], each[best])
    controller = texts.llm.engine.controller
    assert controller is not None
    ledger = controller.ledger
    steps = sum(ledger.steps.values())
    print(
        f"{name_of(cell)}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
        + f"; over plain {over_plain.times()}, over {best} {over_best.times()}; "
        + ", ".join(f"{source} {count / steps:.0%}" for source, count in ledger.steps.items())
        + f"; {ledger.choosing_ms / max(1, ledger.num_chosen) * 1e3:.0f} us to choose", flush=True,
    )  # fmt: skip
    return cell | {
        "tokens_per_s": rates, "best": best, "rounds": len(each[ADAPTIVE]),
        "over_plain": [over_plain.value, over_plain.low, over_plain.high],
        "over_best": [over_best.value, over_best.low, over_best.high],
        "passes": (over_plain.low or 0) > OVER_PLAIN and (over_best.low or 0) > OVER_BEST,
        "steps": dict(ledger.steps), "accepted": dict(ledger.accepted), "nodes": dict(ledger.nodes),
        "repeated_share": texts.repeated_share,
    }  # fmt: skip


def name_of(cell: dict[str, object]) -> str:
    """As in the table."""
    return f"{cell['pair']} {cell['batch']} x {cell['context']} t={cell['temperature']} {cell['text']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="SmolLM2-135M-Instruct's checkpoint; cells of it are left out without")
    parser.add_argument("--draft", default=str(Path(__file__).parent.parent / "src/aquiline/data/smollm2/draft"))
    parser.add_argument("--cells", type=int, nargs="+", help="these of cells.json, from 0; default: all")
    parser.add_argument("--seconds", type=float, default=30.0, help="of measuring, for each cell")
    parser.add_argument("--against-none", action="store_true", help="adaptive against requests that never draft")
    parser.add_argument("--out", type=Path, help="append a JSON line for every cell to this file")
    args = parser.parse_args()
    cells = json.loads(CELLS.read_text())
    rows = []
    for cell in [cells[i] for i in args.cells or range(len(cells))]:
        is_bundled = cell["pair"] == "bundled"
        if not is_bundled and args.smollm2 is None:
            continue
        limit = 4096 if is_bundled else 8192
        context = min(cell["context"], limit - LEAST_ROOM)
        names = ("bundled", None) if is_bundled else (args.smollm2, args.draft)
        llm = open_llm(*names, cell["batch"], min(limit, context + ROOM))
        prompts = prompts_of(llm, not is_bundled, cell["text"], context, cell["batch"])
        texts = Texts(llm, prompts, cell["temperature"])
        if args.against_none:
            ratio = against_none(texts, args.seconds)
            print(
                f"{name_of(cell)}: adaptive over no drafting {ratio.value:.4f} [{ratio.low}, {ratio.high}]", flush=True
            )
            row = cell | {"over_none": [ratio.value, ratio.low, ratio.high]}
        else:
            row = measure(cell, texts, args.seconds)
        rows.append(row | {"system": llm.models.system()} if len(rows) == 0 else row)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(row | {"commit": commit()}) + "\n")
        llm.close()
    print(json.dumps({"benchmark": "never_slower", "cells": rows, "commit": commit()}))


if __name__ == "__main__":
    main()

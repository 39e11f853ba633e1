"""Does adaptive drafting follow a workload that changes? Phases differ in load, context, text and temperature, and in
whether the text copies what stands before it; they follow each other several times over.

In a visit to a phase its requests begin anew, and all settings of turns.py take turns on them as in never_slower.py.
Adaptive drafting knows from the phases before what steps cost and how often drafts are right on the whole, and nothing
of the new requests. So the steps that it takes to find its way in each visit are part of its turns.

A phase passes if adaptive drafting brings at least 0.99x of the tokens per second of the fixed setting that is the best
of that phase, chosen after the run, which favours it. Over the whole, which is the same number of tokens in each phase,
it must be faster than every single fixed setting.

    python benchmarks/phases.py
    python benchmarks/phases.py --smollm2 MODEL.gguf

Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from copying import chats, continued, sources
from turns import ADAPTIVE, FIXED, SETTINGS, Texts, Turn, Turns, open_llm, prompts_of, take_turn

from aquiline.bench.results.intervals import paired
from aquiline.bench.results.result import commit
from aquiline.engine.llm import LLM

AIM = 0.99
MAX_CONTEXT, MAX_BATCH = 4096, 8


@dataclass
class Phase:
    """Requests that run together. text: as in cells.json, or a task of copying.py; turns: by setting, over all
    visits."""

    text: str
    batch: int
    context: int
    temperature: float
    turns: dict[str, list[Turn]] = field(default_factory=lambda: {name: [] for name in SETTINGS})

    @property
    def name(self) -> str:
        """As in the table."""
        return f"{self.batch} x {self.context} t={self.temperature} {self.text}"

    def prompts(self, llm: LLM, is_chat: bool) -> list[list[int]]:
        """The requests' prompts."""
        if self.text not in ("quote", "json", "edit"):
            return prompts_of(llm, is_chat, self.text, self.context, self.batch)
        write, texts = chats if is_chat else continued, sources(llm, self.text, self.batch + 1)
        return [llm.encode(write(self.text, texts, number)) for number in range(1, self.batch + 1)]

    def visit(self, llm: LLM, is_chat: bool, rounds: int, rng: random.Random) -> None:
        """Requests that begin anew, and rounds of all settings on them."""
        controller = llm.engine.controller
        assert isinstance(controller, Turns)
        controller.kept.clear()
        texts = Texts(llm, self.prompts(llm, is_chat), self.temperature)
        order = list(SETTINGS)
        for _ in range(rounds):
            rng.shuffle(order)
            for name in order:
                texts.go_back()
                self.turns[name].append(take_turn(llm, name))
            texts.next_round()
        llm.engine.reset()

    def rates(self) -> dict[str, float]:
        """Tokens per second of each setting."""
        return {
            name: sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)
            for name, turns in self.turns.items()
        }


def phases_of(is_chat: bool) -> list[Phase]:
    """The workload, fixed before anything was measured."""
    invention, code = ("chat", "library") if is_chat else ("documents", "library")
    return [
        Phase(invention, 1, 512, 0.8), Phase(code, 8, 512, 0.8), Phase("json" if is_chat else "quote", 1, 512, 0.0),
        Phase(code, 1, 3000, 0.8), Phase(invention, 4, 512, 1.0), Phase(code, 1, 512, 0.0),
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", help="SmolLM2-135M-Instruct's checkpoint; default: the bundled pair")
    parser.add_argument("--draft", default=str(Path(__file__).parent.parent / "src/aquiline/data/smollm2/draft"))
    parser.add_argument("--visits", type=int, default=4, help="to each phase, one after the other")
    parser.add_argument("--rounds", type=int, default=4, help="of a visit")
    args = parser.parse_args()
    is_chat = args.smollm2 is not None
    llm = open_llm(args.smollm2 or "bundled", args.draft if is_chat else None, MAX_BATCH, MAX_CONTEXT)
    phases, rng = phases_of(is_chat), random.Random(0)
    for number in range(args.visits + 1):
        if number == 1:  # the first visits warm up
            for phase in phases:
                for turns in phase.turns.values():
                    turns.clear()
        for phase in phases:
            phase.visit(llm, is_chat, args.rounds, rng)
    rows, ms_per_token = [], dict.fromkeys(SETTINGS, 0.0)
    for phase in phases:
        rates = phase.rates()
        best = max(FIXED, key=rates.__getitem__)
        over = paired([t.rate for t in phase.turns[ADAPTIVE]], [t.rate for t in phase.turns[best]])
        for name, rate in rates.items():
            ms_per_token[name] += 1e3 / rate
        rows.append({
            "phase": phase.name, "tokens_per_s": rates, "best": best, "over_best": [over.value, over.low, over.high],
            "passes": rates[ADAPTIVE] >= AIM * rates[best],
        })  # fmt: skip
        print(
            f"{phase.name}: " + ", ".join(f"{name} {rate:.0f}" for name, rate in rates.items())
            + f"; {rates[ADAPTIVE] / rates[best]:.3f} of {best} (by round {over.times()})", flush=True,
        )  # fmt: skip
    whole = {name: 1e3 * len(phases) / ms for name, ms in ms_per_token.items()}
    best = max(FIXED, key=whole.__getitem__)
    print(
        "whole, the same tokens of each phase: " + ", ".join(f"{name} {rate:.0f}" for name, rate in whole.items())
        + f"; adaptive over {best} {whole[ADAPTIVE] / whole[best]:.3f}", flush=True,
    )  # fmt: skip
    print(json.dumps({
        "benchmark": "phases", "phases": rows, "whole": whole, "system": llm.models.system(), "commit": commit(),
    }))  # fmt: skip
    llm.close()


if __name__ == "__main__":
    main()

"""Served tau over served tokens of a draft that learns from one kind of traffic, and of old prompts beside it.

    python benchmarks/learning.py --target bundled --prompts FILE.jsonl [--prefix TEXT] --out DIR [--rounds 5]
    python benchmarks/learning.py --draw DIR/learning.json [FILE ...] --out PICTURE.svg

FILE has a row of `turns` or `messages` per prompt, of which the first user turn is asked, after --prefix: so a file of
questions makes a kind of traffic that the draft has not met. Half of the requests are greedy, half drawn at 0.8. The
last --held-out ones are never learnt from. After every --round-tokens served tokens the learner makes a generation
(aquiline/train/learner); if it is accepted it serves on, as a server would have it. Held-out requests and the pair's
own prompts (--old) are then decoded with that generation's draft: tau is what the engine's steps committed, beside it
the interval of its ratio to the shipped draft's over the same requests, and all tokens must be those of before.

DIR holds learning.json and the folder that was learnt in. A run that was stopped goes on when it is called again.
--draw makes the picture of one or more kinds. Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from aquiline.bench.data.datasets import load_questions
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.learning.store import LearningStore, Place, Served, ServedWriter, ServingState
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import ResolvedPair
from aquiline.models.known_pairs import pair_of
from aquiline.regenerate.answering import rejected_tokens
from aquiline.spec.drafting import Chain
from aquiline.train.learner.generation import Learner, paired_interval
from aquiline.train.learner.lesson import read_lesson

TEMPERATURES = (0.0, 0.8)
MOST_PROMPT = 256
"""Tokens of a prompt; longer ones are cut."""

Point = dict[str, Any]
Taken = dict[str, list[int]]
"""`committed` and `steps` of each request."""


class Serving:
    """A pair with one generation's draft. It answers with chains of --num-spec-tokens drafts."""

    def __init__(self, pair: ResolvedPair, draft: Path, args: argparse.Namespace) -> None:
        models = replace(pair, draft=draft).load()
        self.llm = LLM.from_models(models, EngineConfig(max_batch=16), Chain(args.num_spec_tokens))
        self.num_spec_tokens, self.max_tokens = args.num_spec_tokens, args.max_tokens

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Prompts as token ids, through the chat template if there is one."""
        models = self.llm.models
        assert models.tokenizer is not None
        if models.template.has_template:
            prompts = [models.template.encode([{"role": "user", "content": text}]) for text in texts]
        else:
            bos = models.target_config.bos_token_id
            prompts = [[*([] if bos is None else [bos]), *models.tokenizer.encode(text).ids] for text in texts]
        return [prompt[:MOST_PROMPT] for prompt in prompts]

    def serve(self, prompts: list[list[int]], first: int) -> list[Served]:
        """Answers as a server stores them, at the temperatures by turns; the seed is the number of the request."""
        drawn = [SamplingParams(max_tokens=self.max_tokens, temperature=TEMPERATURES[i % 2], seed=i) for i in
                 range(first, first + len(prompts))]  # fmt: skip
        outputs = self.llm.generate(prompts, drawn)
        return [self._served(output, each.temperature) for output, each in zip(outputs, drawn, strict=True)]

    def _served(self, output: Output, temperature: float) -> Served:
        missed = rejected_tokens(output.by_draft, self.num_spec_tokens)
        at = [len(output.prompt_ids) + i for i, is_missed in enumerate(missed) if is_missed]
        return Served(output.prompt_ids + output.token_ids, len(output.prompt_ids), at, temperature)

    def taken(self, prompts: list[list[int]], written: dict[str, list[list[int]]]) -> dict[str, Taken]:
        """Tokens and steps of each prompt per temperature; `written` gets the tokens, or must hold the same ones."""
        found = {}
        for temperature in TEMPERATURES:
            drawn = [SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=i) for i in
                     range(len(prompts))]  # fmt: skip
            outputs = self.llm.generate(prompts, drawn)
            texts = [output.token_ids for output in outputs]
            if written.setdefault(str(temperature), texts) != texts:
                raise SystemExit(f"a draft changed a text at temperature {temperature}")
            counters = [output.metrics for output in outputs]
            found[str(temperature)] = {
                "committed": [each.num_committed for each in counters], "steps": [each.num_steps for each in counters]
            }  # fmt: skip
        return found


class Run:
    """A run in the folder --out, where it goes on from. texts: what held-out requests and old prompts were answered."""

    def __init__(self, args: argparse.Namespace) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self.args, self.file, self.texts_file = args, args.out / "learning.json", args.out / "texts.json"
        self.store, self.pair = LearningStore(args.out / "learnt"), ResolvedPair.of(PairConfig(args.target))
        self.store.claim({"target": args.target, "draft": None}, {"target": str(self.pair.target)})
        self.learner, self.writer = Learner(self.store, self.pair), ServedWriter(self.store, 1 << 26)
        self.kind = [args.prefix + question.turns[0] for question in load_questions(args.prompts)]
        self.old = [question.turns[0] for question in load_questions(args.old or pair_of(args.target).demo)]
        self.points: list[Point] = json.loads(self.file.read_text())["points"] if self.file.exists() else []
        self.texts: dict[str, Any] = {"kind": {}, "old": {}}
        if self.texts_file.exists():
            self.texts = json.loads(self.texts_file.read_text())

    @property
    def place(self) -> Place:
        """Up to where generations have read."""
        file = self.store.folder / "learner.json"
        return tuple(json.loads(file.read_text())["last"]) if file.exists() else (0, 0)

    def go_on(self) -> None:
        """Measure, serve and learn by turns until there are --rounds generations."""
        while True:
            serving = Serving(self.pair, self.learner.draft(self.store.state().serving), self.args)
            kind = serving.ids(self.kind)
            if not self.points or "generation" in self.points[-1]:
                self._measure(serving, kind[-self.args.held_out :])
            if len(self.points) > self.args.rounds:
                return
            self._serve(serving, kind[: -self.args.held_out])
            self._learn()

    def _serve(self, serving: Serving, prompts: list[list[int]]) -> None:
        """Serve --round-tokens more than the last point has. The store says which requests were served."""
        served = list(self.store.served())
        first, num_served = len(served), sum(len(each.tokens) - each.num_prompt for each in served)
        while num_served < self.points[-1]["served"] + self.args.round_tokens:
            assert first < len(prompts), "the file has too few prompts"
            for each in serving.serve(prompts[first : first + 16], first):
                self.writer.add(each)
                num_served += len(each.tokens) - each.num_prompt
                first += 1

    def _learn(self) -> None:
        """Make the next generation; if it is accepted, it serves."""
        began = time.process_time()
        found = self.learner.learn(read_lesson(self.store, self.place))
        assert found is not None, "nobody asks this process to stop"
        if found.accepted:
            self.store.write_state(ServingState(found.generation))
        self._say(self.points[-1], generation=vars(found) | {"cpu_s": time.process_time() - began})

    def _measure(self, serving: Serving, held_out: list[list[int]]) -> None:
        """A point of the draft that serves. That of one which was measured before is measured no second time."""
        served = sum(len(each.tokens) - each.num_prompt for each in self.store.served())
        if self.points and not self.points[-1]["generation"]["accepted"]:
            point = {name: self.points[-1][name] for name in ("kind", "old")}
        else:
            point = {
                "kind": serving.taken(held_out, self.texts["kind"]),
                "old": serving.taken(serving.ids(self.old), self.texts["old"]),
            }
        self.texts_file.write_text(json.dumps(self.texts))
        self.points.append({"served": served, "serving": self.store.state().serving})
        self._say(self.points[-1], **point)

    def _say(self, point: Point, **told: Any) -> None:
        point |= told
        self.file.write_text(json.dumps({"name": self.args.name, "points": self.points}, indent=1) + "\n")
        shown = {name: told[name] for name in told if name == "generation"}
        for name in ("kind", "old") if "kind" in told else ():
            shown[name] = {t: Compared.of(self.points[0][name][t], told[name][t]).shown for t in told[name]}
        print(f"{point['served']:8} {shown}", flush=True)


@dataclass(frozen=True)
class Compared:
    """Tau of a draft, and the interval of its ratio to the shipped draft's on the same requests."""

    tau: float
    low: float
    high: float

    @classmethod
    def of(cls, before: Taken, after: Taken) -> Compared:
        """From the steps that each request took."""
        steps = np.array(after["steps"], float)
        low, high = paired_interval(np.array(before["steps"], float), steps)
        return cls(sum(after["committed"]) / float(steps.sum()), low, high)

    @property
    def shown(self) -> str:
        """As a line says it."""
        return f"{self.tau:.3f} [{self.low:.3f}, {self.high:.3f}]"


def draw(runs: list[dict[str, Any]], file: Path) -> None:
    """Served tau over served tokens, of held-out requests and of old prompts, a panel for each kind of traffic."""
    figure = Figure(figsize=(1 + 4.5 * len(runs), 4.5), layout="constrained")
    panels = figure.subplots(1, len(runs), squeeze=False, sharex=True, sharey=True)[0]
    for panel, run in zip(panels, runs, strict=True):
        draw_kind(panel, run["points"])
        panel.set(title=run["name"], xlabel="thousand tokens served", ylim=(1, None))
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens committed per step (tau)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "learning"}):
        figure.savefig(file)


def draw_kind(panel: Axes, points: list[Point]) -> None:
    """The lines of one kind; bars are the interval of the ratio to the shipped draft's tau."""
    served = [point["served"] / 1000 for point in points]
    for name, label, style in (("kind", "held-out requests", "-"), ("old", "old prompts", "--")):
        for temperature, color in zip(map(str, TEMPERATURES), ("tab:blue", "tab:orange"), strict=True):
            found = [Compared.of(points[0][name][temperature], point[name][temperature]) for point in points]
            first = found[0].tau
            taus = np.array([each.tau for each in found])
            bars = np.abs(np.array([[each.low * first, each.high * first] for each in found]).T - taus)
            label_of = f"{label}, temperature {float(temperature):g}"
            panel.errorbar(served, taus, bars, fmt=style, marker="o", ms=4, capsize=2, color=color, label=label_of)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="bundled")
    parser.add_argument("--prompts", help="the kind of traffic")
    parser.add_argument("--name", default="", help="what the picture calls this kind")
    parser.add_argument("--prefix", default="", help="put before each prompt")
    parser.add_argument("--old", help="prompts that the draft was shipped for; default: the known pair's own")
    parser.add_argument("--rounds", type=int, default=5, help="generations")
    parser.add_argument("--round-tokens", type=int, default=8192)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    parser.add_argument("--draw", nargs="+", type=Path, help="result files, of which a picture is made")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.draw:
        draw([json.loads(file.read_text()) for file in args.draw], args.out)
        print(json.dumps({"out": str(args.out)}))
        return
    if not args.prompts:
        parser.error("--prompts: name a file of prompts, or result files with --draw")
    run = Run(args)
    run.go_on()
    print(json.dumps({"points": len(run.points), "out": str(args.out)}))


if __name__ == "__main__":
    main()

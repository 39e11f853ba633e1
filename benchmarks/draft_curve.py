"""Served tau of several drafts of one target: against the tokens they were trained on, on several sets of questions.

    python benchmarks/draft_curve.py --target DIR_OR_GGUF --drafts 300000=DIR 1000000=DIR ... \
        --questions held-out=FILE mt-bench=FILE --out DIR

The engine answers the first turn of every question through the target's chat template, with each draft and a chain,
greedily and at a temperature. Tau is what its steps committed; behind it stands how much that is beside the first
draft, with its 95 % interval over questions. With --simulate the tau that training's judgement predicts for the same
texts stands there, too. Answers must be the same for all drafts, token for token, or the script fails. Writes
curve.json and curve.png into OUT and ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from aquiline.backends.torch.eagle import load_draft
from aquiline.bench.data.datasets import load_questions
from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM, Output
from aquiline.models.draft_config import read_draft_config
from aquiline.models.files import resolve
from aquiline.spec.drafting import Chain
from aquiline.text.chat_template import ChatTemplate
from aquiline.train.batches import Assembler
from aquiline.train.learner.generation import paired_interval
from aquiline.train.simulated_tau import HeldOut, JudgedText
from aquiline.train.teacher import Teacher, Views


@dataclass(frozen=True)
class Point:
    """One draft on one set at one temperature."""

    name: str
    questions: str
    temperature: float
    tau: float
    by_position: list[float]
    num_tokens: int
    ratio: float
    """Steps of the first draft over this one's, for the same texts."""
    ratio_interval: tuple[float, float]
    simulated_tau: float | None = None


class Simulator:
    """What training would say of a draft on given texts (train/simulated_tau.py)."""

    def __init__(self, target: Path, draft: Path, num_spec_tokens: int) -> None:
        path = resolve(target)
        capture = read_draft_config(draft, path).capture
        teacher = Teacher(path, capture, "cpu", 2048)
        self.head = load_draft(draft, teacher.decoder, dtype="float32", capture=capture)
        scale = torch.ones(self.head.fc.shape[1])
        views = Views(teacher.views, None)
        vocab = self.head.target_ids(torch.arange(len(self.head.d2t)))
        self.assembler = Assembler(views, scale, vocab, teacher.head, "cpu")
        self.num_spec_tokens = num_spec_tokens

    def tau(self, outputs: list[Output], temperature: float) -> float:
        """Tokens committed per cycle along these outputs."""
        texts = [
            JudgedText(np.array(o.prompt_ids + o.token_ids, np.int32), len(o.prompt_ids), temperature)
            for o in outputs
            if len(o.token_ids) > 1
        ]
        judgement = HeldOut(self.assembler, texts, self.num_spec_tokens).judge(self.head)
        return judgement.tau_sampled if temperature > 0 else judgement.tau


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE."""
    name, _, value = text.partition("=")
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r}: write NAME=PATH")
    return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", type=named, nargs="+", required=True, metavar="TOKENS=DIR")
    parser.add_argument("--questions", type=named, nargs="+", required=True, metavar="NAME=FILE")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    parser.add_argument("--draft-dtype", default="auto", help="how the engine stores the drafts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--limit", type=int, help="questions of each set, the first ones")
    parser.add_argument("--simulate", action="store_true", help="predict tau from the texts, as training does")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    drafting = Chain(args.num_spec_tokens)
    points: list[Point] = []
    written: dict[tuple[str, float], list[list[int]]] = {}
    first: dict[tuple[str, float], np.ndarray] = {}
    for name, draft in args.drafts:
        engine = EngineConfig(max_batch=args.max_batch, max_context=2048)
        llm = LLM(args.target, draft, draft_dtype=args.draft_dtype, drafting=drafting, engine=engine)
        template = ChatTemplate.load(resolve(args.target), llm.models.tokenizer)
        simulator = Simulator(Path(args.target), Path(draft), args.num_spec_tokens) if args.simulate else None
        for set_name, file in args.questions:
            questions = load_questions(file, args.limit)
            prompts = [template.encode([{"role": "user", "content": q.turns[0]}]) for q in questions]
            for temperature in args.temperatures:
                sampling = [
                    SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=i)
                    for i in range(len(prompts))
                ]
                result = llm.run(prompts, sampling)
                texts = [output.token_ids for output in result.outputs]
                if written.setdefault((set_name, temperature), texts) != texts:
                    raise SystemExit(f"{name}: other answers to {set_name} at temperature {temperature} than before")
                steps = np.array([output.metrics.num_steps for output in result.outputs], np.float64)
                before = first.setdefault((set_name, temperature), steps)
                ratio, interval = float(before.sum() / steps.sum()), paired_interval(before, steps)
                counters = result.summary.counters
                num_tokens = sum(map(len, texts))
                simulated = simulator.tau(result.outputs, temperature) if simulator else None
                point = Point(
                    name, set_name, temperature, counters.tau, counters.per_position, num_tokens, ratio, interval,
                    simulated,
                )  # fmt: skip
                points.append(point)
                positions = " ".join(f"{share:.2f}" for share in point.by_position)
                told = "" if simulated is None else f"  simulated {simulated:.3f}"
                beside = f"{ratio:.3f} [{interval[0]:.3f}, {interval[1]:.3f}]"
                print(
                    f"{name:>12} {set_name:12} t={temperature:g}  tau {point.tau:.3f}{told}  {beside}  {positions}",
                    flush=True,
                )
    (args.out / "curve.json").write_text(json.dumps([vars(p) for p in points], indent=1) + "\n")
    draw(points, args.out / "curve.png")
    print(json.dumps({"points": len(points), "out": str(args.out)}))


def draw(points: list[Point], file: Path) -> None:
    """Tau over trained tokens, a line per set, a panel per temperature."""
    from matplotlib.figure import Figure

    temperatures = sorted({p.temperature for p in points})
    figure = Figure(figsize=(5.5 * len(temperatures), 4), layout="constrained")
    panels = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for panel, temperature in zip(panels, temperatures, strict=True):
        for name in dict.fromkeys(p.questions for p in points):
            own = [p for p in points if p.questions == name and p.temperature == temperature]
            panel.plot([float(p.name) for p in own], [p.tau for p in own], marker="o", label=name)
        panel.set(xscale="log", xlabel="tokens trained on", title=f"temperature {temperature:g}")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("tokens committed per step (tau)")
    panels[0].legend()
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()

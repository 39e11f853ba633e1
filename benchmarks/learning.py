"""Served tau over served tokens of a draft that learns from one kind of traffic, and of old prompts beside it.

    python benchmarks/learning.py --target bundled --prompts FILE.jsonl [--prefix TEXT] --out DIR [--rounds 5]

FILE has a row of `turns` or `messages` per prompt, of which the first user turn is asked, behind --prefix: so a file of
questions makes a kind of traffic that the draft has not met. Half of the requests are greedy, half drawn at 0.8. The
last --held-out ones are never learnt from. After every --round-tokens served tokens the learner makes a generation
(aquiline/train/learner); if it is accepted it serves on, as a server would have it. Held-out requests and the pair's
own prompts (--old) are then decoded with that generation's draft: tau is what the engine's steps committed, and all
tokens must be those of before. OUT, a new folder, holds learning.json, learning.png and the folder that was learnt in.
Ends with one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from aquiline.bench.data.datasets import load_questions
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.learning.store import LearningStore, Served, ServedWriter, ServingState
from aquiline.engine.llm import LLM, Output
from aquiline.engine.model import ResolvedPair
from aquiline.models.known_pairs import pair_of
from aquiline.regenerate.answering import rejected_tokens
from aquiline.spec.drafting import Chain
from aquiline.train.learner.generation import Learner
from aquiline.train.learner.lesson import read_lesson

TEMPERATURES = (0.0, 0.8)
MOST_PROMPT = 256
"""Tokens of a prompt; longer ones are cut."""

Point = dict[str, Any]


class Serving:
    """A pair with one generation's draft. It answers with chains of num_spec_tokens drafts."""

    def __init__(self, pair: ResolvedPair, draft: Path, num_spec_tokens: int, max_tokens: int) -> None:
        models = replace(pair, draft=draft).load()
        self.llm = LLM.from_models(models, EngineConfig(max_batch=16), Chain(num_spec_tokens))
        self.num_spec_tokens, self.max_tokens = num_spec_tokens, max_tokens

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

    def tau(self, prompts: list[list[int]], written: dict[float, list[list[int]]]) -> dict[str, float]:
        """Tau per temperature over these prompts; `written` gets the tokens, or must hold the same ones."""
        found = {}
        for temperature in TEMPERATURES:
            drawn = [SamplingParams(max_tokens=self.max_tokens, temperature=temperature, seed=i) for i in
                     range(len(prompts))]  # fmt: skip
            done = self.llm.run(prompts, drawn)
            texts = [output.token_ids for output in done.outputs]
            if written.setdefault(temperature, texts) != texts:
                raise SystemExit(f"a draft changed a text at temperature {temperature}")
            found[str(temperature)] = done.summary.counters.tau
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--prompts", required=True, help="the kind of traffic")
    parser.add_argument("--prefix", default="", help="put before each prompt")
    parser.add_argument("--old", help="prompts that the draft was shipped for; default: the known pair's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-tokens", type=int, default=8192)
    parser.add_argument("--held-out", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--num-spec-tokens", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True)
    store, pair = LearningStore(args.out / "learnt"), ResolvedPair.of(PairConfig(args.target))
    store.claim({"target": args.target, "draft": None}, {"target": str(pair.target)})
    learner, writer, points = Learner(store, pair), ServedWriter(store, 1 << 26), list[Point]()
    texts = [args.prefix + question.turns[0] for question in load_questions(args.prompts)]
    old_texts = [question.turns[0] for question in load_questions(args.old or pair_of(args.target).demo)]
    written: dict[str, dict[float, list[list[int]]]] = {"kind": {}, "old": {}}
    after, first, num_served = (0, 0), 0, 0
    while True:
        serving = Serving(pair, learner.draft(store.state().serving), args.num_spec_tokens, args.max_tokens)
        prompts, old = serving.ids(texts), serving.ids(old_texts)
        kind = serving.tau(prompts[-args.held_out :], written["kind"])
        points.append({"served": num_served, "kind": kind, "old": serving.tau(old, written["old"])})
        print(points[-1], flush=True)
        (args.out / "learning.json").write_text(json.dumps(points, indent=1) + "\n")
        if len(points) > args.rounds:
            break
        end = num_served + args.round_tokens
        while num_served < end:
            for each in serving.serve(prompts[first : min(first + 16, len(prompts) - args.held_out)], first):
                writer.add(each)
                num_served += len(each.tokens) - each.num_prompt
            first += 16
        lesson, began = read_lesson(store, after), time.process_time()
        found = learner.learn(lesson)
        assert found is not None, "nobody asks this process to stop"
        after = lesson.last
        points[-1]["generation"] = vars(found) | {"cpu_s": time.process_time() - began}
        print(points[-1]["generation"], flush=True)
        if found.accepted:
            store.write_state(ServingState(found.generation))
    draw(points, args.out / "learning.png")
    print(json.dumps({"points": len(points), "out": str(args.out)}))


def draw(points: list[Point], file: Path) -> None:
    """Served tau over served tokens, of held-out requests of the kind and of old prompts."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5, 4), layout="constrained")
    panel = figure.subplots()
    served = [point["served"] / 1000 for point in points]
    for name, label, style in (("kind", "held-out requests", "-"), ("old", "old prompts", "--")):
        for temperature, color in zip(TEMPERATURES, ("tab:blue", "tab:orange"), strict=True):
            taus = [point[name][str(temperature)] for point in points]
            panel.plot(served, taus, style, marker="o", color=color, label=f"{label}, temperature {temperature:g}")
    panel.set(xlabel="thousand tokens served", ylabel="tokens committed per step (tau)", ylim=(1, None))
    panel.grid(alpha=0.3)
    panel.legend(fontsize=8)
    figure.savefig(file, dpi=130)


if __name__ == "__main__":
    main()

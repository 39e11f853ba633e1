"""`aquiline eval`: baseline against drafts on the same questions, at several lengths."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.bench.data.datasets import Sample
from aquiline.bench.eval.eval_plan import OUTPUT, EvalPlan
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import named
from aquiline.config import ChatConfig, EngineConfig, PairConfig
from aquiline.writing import check_place

if TYPE_CHECKING:
    from aquiline.bench.eval.eval_report import EvalReport

EXAMPLES = """
Examples:

  aquiline eval

  aquiline eval --target smollm2 --count 30 --temperature 0 0.8

  aquiline eval --num-spec-tokens 1 2 3 4 5 --trees 2x2x6 4x4x16 --lengths 50 100 200 500 --out results/

  aquiline eval --target ./target --draft ./draft --dataset mt_bench --count 20 --temperature 0 0.8 --out results/

  aquiline eval --target smollm2 --batch 8 --adaptive --temperature 0 1

  aquiline eval --target ./target --draft ./draft --dataset gsm8k --count 100 --sample-seed 1 --lengths 1000 --json

OUT holds eval.json (every run, every figure), eval.md, eval.png, and answers/ in EAGLE's format.
"""


@with_options
def evaluate(
    *,
    sample: Sample,
    plan: EvalPlan,
    pair: PairConfig,
    template: Annotated[ChatConfig, Fields(only=("template_options",))],
    engine: Annotated[EngineConfig, Fields(only=("max_context",))],
    out: Annotated[
        Path | None, typer.Option(help="Folder for eval.json, eval.md, eval.png and answers/.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print eval.json.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Compare drafting settings with the baseline on the same questions: speed with its interval, acceptance, the best.

    Every setting writes the same tokens, or the command ends with an error that names the place. Ranges over chains and
    trees are a search; the best is named per length and overall.
    """
    from aquiline.bench.data.datasets import load_questions
    from aquiline.bench.eval.eval_report import EvalFacts, EvalReport, dataset_name, model_facts
    from aquiline.bench.eval.evaluate import Evaluation
    from aquiline.cli.show.evaluation import run_shown
    from aquiline.engine.llm import LLM
    from aquiline.models.known_pairs import checkpoints, pair_of

    check_place(out, is_folder=True)
    if checkpoints(pair.target, pair.draft).draft is None:
        raise ValueError(f"target={pair.target!r}, draft=None: name the draft too; only known pairs have their own")
    pair = named(pair)
    dataset = sample.dataset or pair_of(pair.target).questions
    questions = load_questions(dataset, sample.count, sample.sample_seed)
    llm = LLM.open(pair, replace(engine, max_batch=plan.batch, prefix_cache=False))
    wrapped = llm.template(template.template_options)
    model = model_facts(llm, pair.target, pair.draft)
    evaluation = Evaluation(llm, wrapped, questions, plan, model.target, out / "answers" if out else None)
    found = run_shown(evaluation, is_shown=not as_json)
    facts = EvalFacts(model, dataset_name(dataset), sample.sample_seed, wrapped.has_template, llm.models.system())
    _deliver(EvalReport(found, facts), out, as_json)


def _deliver(report: EvalReport, out: Path | None, as_json: bool) -> None:
    """Print the figures, and write them into `out`."""
    from aquiline.cli.show.evaluation import plot_or_say_why, show_evaluation

    if as_json:
        print(json.dumps(report.document()))
    else:
        show_evaluation(report)
    if out is not None:  # last: a disk that is full must not cost the figures
        report.write(out)
        plot_or_say_why(report, out)


evaluate.__doc__ = f"{inspect.getdoc(evaluate)}\n{EXAMPLES}"

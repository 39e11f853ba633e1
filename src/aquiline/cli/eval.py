"""`aquiline eval`: baseline against drafts on the same questions, at several lengths."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import (
    Arithmetic,
    Capture,
    Draft,
    Dtype,
    NormFeedback,
    Target,
    TemplateOptions,
    load_template,
    template_options_of,
    wide_console,
)
from aquiline.cli.train import layers

if TYPE_CHECKING:
    from rich.table import Table

    from aquiline.bench.eval.evaluate import Evaluation
    from aquiline.bench.eval.figures import Figures, Tables
    from aquiline.bench.eval.plan import Evaluated
    from aquiline.bench.eval.report import EvalFacts

DATA, SEARCH, SAMPLING, OUTPUT = "Questions", "Settings", "Sampling", "Output"
BAR = 10

EXAMPLES = """
Examples:

  aquiline eval

  aquiline eval --num-spec-tokens 1 2 3 4 5 --trees 2x2x6 4x4x16 --lengths 50 100 200 500 --out results/

  aquiline eval --target DIR --draft DIR --dataset mt_bench --count 20 --temperature 0 0.8 --out results/

  aquiline eval --target DIR --draft DIR --dataset gsm8k --count 100 --sample-seed 1 --lengths 1000 --json

OUT holds eval.json (every run, every figure), eval.md, eval.png, and answers/ in EAGLE's format.
"""


def evaluate(
    target: Target = None,
    draft: Draft = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="mt_bench, gsm8k, humaneval, alpaca, spec_bench, a JSONL, JSON or .txt file, or "
            "hf://datasets/OWNER/NAME/FILE. Default: the bundled held-out prompts.",
            rich_help_panel=DATA,
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(help="Exactly so many questions, the first. Default: all.", rich_help_panel=DATA)
    ] = None,
    sample_seed: Annotated[
        int | None, typer.Option(help="With --count: a sample by this seed.", rich_help_panel=DATA)
    ] = None,
    template_options: TemplateOptions = None,
    num_spec_tokens: Annotated[
        list[int] | None, typer.Option(help="Chain lengths to compare, as 1 2 3 4 5.", rich_help_panel=SEARCH)
    ] = None,
    trees: Annotated[
        list[str] | None,
        typer.Option(
            help="Trees to compare: DEPTHxTOP_KxNODES, as 2x2x6 4x8x32 (EAGLE's is 5x10x60), or static. Default: "
            "chain 3 and 2x2x6.",
            rich_help_panel=SEARCH,
        ),
    ] = None,
    lengths: Annotated[
        list[int] | None, typer.Option(help="New tokens at most. Default: 50 100 200.", rich_help_panel=SAMPLING)
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(help="One or several. Default: 0.", rich_help_panel=SAMPLING)
    ] = None,
    repeats: Annotated[int, typer.Option(help="Runs of each text, for the times.", rich_help_panel=SAMPLING)] = 1,
    seed: Annotated[int, typer.Option(help="Question i draws with seed + i.", rich_help_panel=SAMPLING)] = 0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Write every text to its length.", rich_help_panel=SAMPLING)
    ] = False,
    teacher_forced: Annotated[
        bool,
        typer.Option(
            help="Also judge the draft at every position, which takes one more slow run per text.",
            rich_help_panel=OUTPUT,
        ),
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder for eval.json, eval.md, eval.png and answers/.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print eval.json.", rich_help_panel=OUTPUT)] = False,
    max_context: Annotated[int | None, typer.Option(help="Tokens per text, prompt and output.")] = None,
    capture: Capture = None,
    norm_feedback: NormFeedback = None,
    dtype: Dtype = "bfloat16",
    arithmetic: Arithmetic = "auto",
) -> None:
    """Compare drafting settings with the baseline on the same questions: speed with its interval, acceptance, the best.

    Every setting writes the same tokens, or the command ends with an error that names the place. Ranges over chains and
    trees are a search; the best is named per length and overall.
    """
    from aquiline.bench.data.datasets import load_questions
    from aquiline.bench.eval.evaluate import Evaluation
    from aquiline.bench.eval.figures import tables
    from aquiline.bench.eval.plan import EvalPlan, settings_of
    from aquiline.bench.eval.report import EvalFacts, as_document, model_facts, name_of, write_report
    from aquiline.config import EngineConfig
    from aquiline.engine.bundled import BUNDLED_PROMPTS
    from aquiline.engine.llm import LLM

    plan = EvalPlan(
        settings_of(num_spec_tokens or (), trees or ()), tuple(lengths or (50, 100, 200)), tuple(temperature or (0.0,)),
        repeats, seed, ignore_eos, teacher_forced,
    )  # fmt: skip
    if (target is None) != (draft is None):
        raise ValueError(f"target={target!r}, draft={draft!r}: name both, or neither for the bundled pair")
    if sample_seed is not None and count is None:
        raise ValueError(f"sample_seed={sample_seed}: samples --count questions; give --count")
    options = template_options_of(template_options)
    questions = load_questions(dataset or BUNDLED_PROMPTS, count, sample_seed)
    llm = LLM(
        target, draft, dtype=dtype, arithmetic=arithmetic, capture=layers(capture), norm_feedback=norm_feedback,
        engine=EngineConfig(max_batch=1, prefix_cache=False, max_context=max_context),
    )  # fmt: skip
    template = load_template(target, llm, options)
    model = model_facts(llm, target, draft)
    evaluation = Evaluation(llm, template, questions, plan, model.target, out / "answers" if out else None)
    found = _run(evaluation, is_shown=not as_json)
    derived = tables(found)
    facts = EvalFacts(model, name_of(dataset), sample_seed, template.has_template, llm.models.system())
    if out is not None:
        write_report(found, derived, facts, out)
        _plot(found, derived, facts, out)
    if as_json:
        print(json.dumps(as_document(found, derived, facts)))
    else:
        _show(found, derived, facts)


evaluate.__doc__ = (evaluate.__doc__ or "") + EXAMPLES


def _run(evaluation: Evaluation, is_shown: bool) -> Evaluated:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("evaluating"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_shown = is_shown and console.is_terminal
    with Progress(*columns, console=console, disable=not is_shown, transient=True) as progress:
        task = progress.add_task("", total=evaluation.num_tokens)
        evaluation.on_progress = lambda num_tokens: progress.advance(task, num_tokens)
        return evaluation.run()


def _plot(found: Evaluated, derived: Tables, facts: EvalFacts, out: Path) -> None:
    from aquiline.bench.eval.plot import plot_evaluation

    headline = f"{facts.dataset}, {len(found.questions)} questions: {facts}"
    try:
        plot_evaluation(found, derived, headline, out / "eval.png")
    except ValueError as error:
        print(f"aquiline: {out / 'eval.png'} was not written: {error}", file=sys.stderr)


def _show(found: Evaluated, derived: Tables, facts: EvalFacts) -> None:
    from rich.table import Table

    from aquiline.bench.eval.report import groups, notes, teacher_table, teacher_title

    console = wide_console()
    console.print(f"{facts.dataset}: {len(found.questions)} questions; {facts}\n", soft_wrap=True)
    for table in _tables(groups(derived), "length"):
        console.print(table)
    for table in _tables(derived.by_category, "category"):
        console.print(table)
    for taught in found.teacher_forced:
        rows = teacher_table(found, taught)
        table = Table("place in the chain", title=teacher_title(taught), title_justify="left")
        for place in range(len(taught.accuracy.marginal)):
            table.add_column(str(place + 1), justify="right")
        for name, values in rows.items():
            table.add_row(name, *values)
        console.print(table)
    console.print("repeated: share of 8-grams that stood earlier in the same text; loops flatter every drafter\n")
    for line in notes(found, derived):
        console.print(line, soft_wrap=True, markup=False)


def _tables(groups: list[list[Figures]], by: str) -> list[Table]:
    """Speed and acceptance of groups, a section each."""
    from rich.table import Table

    from aquiline.bench.eval.report import cells

    speed = ("setting", "s/text", "tok/s", "", "speedup [95 %]", "with prefill")
    drafts = ("setting", "tau", "calls/token", "accepted", "by position", "repeated")
    made = []
    for columns in (speed, drafts) if groups else ():
        table = Table("temp", by, title_justify="left")
        for column in columns:
            table.add_column(column, justify="left" if column in ("setting", "", "by position") else "right")
        for group in groups:
            top = max(f.decode_tokens_per_s for f in group)
            first = group[0]
            where = [
                "all" if first.temperature is None else f"{first.temperature:g}",
                str((first.length if by == "length" else first.category) or "all"),
            ]
            for f in group:
                row = cells(f) | {"": _bar(f.decode_tokens_per_s / top if top else 0.0)}
                table.add_row(*where, *(row[column] for column in columns))
                where = ["", ""]
            table.add_section()
        made.append(table)
    return made


def _bar(share: float) -> str:
    return "█" * round(BAR * share) + "░" * (BAR - round(BAR * share))

"""The demo's figures in the terminal: a table, and one answer whose tokens are coloured by their source."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aquiline.bench.results.intervals import estimate
from aquiline.bench.suite.demo_run import CHAINS, Demo, DemoResult, DemoRun, run_demo
from aquiline.bench.tables import NO_FIGURE, Table
from aquiline.bench.theory.bounds import expectation
from aquiline.cli.options import wide_console
from aquiline.cli.show.writers import coloured, legend, shares_of
from aquiline.engine.chat_session import pieces_of
from aquiline.engine.llm import LLM

COLUMNS = ("setting", "temp", "tok/s", "speedup", "tau", "accepted by position", "repeated", "same text")
SHOWN = 5
"""Positions of a draft that the table shows."""


def run_shown(llm: LLM, demo: Demo, is_shown: bool) -> DemoResult:
    """Run the demo with a bar on standard error."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task(f"{demo.name}, {len(demo.prompts)} prompts", total=None)  # to and fro at first
        return run_demo(llm, demo, lambda: progress.update(task, total=demo.num_runs, advance=1))


def show_demo(result: DemoResult, llm: LLM) -> None:
    """Print speed and acceptance of every setting, and one answer with its writers marked."""
    console, demo = wide_console(), result.demo
    length = (
        f"{demo.new_tokens} new tokens each" if demo.end_ids is None else f"answers of up to {demo.new_tokens} tokens"
    )
    title = f"{demo.name}: {len(demo.prompts)} held-out prompts, {length}"
    console.print(Table(COLUMNS, [_row(run) for run in result.runs], title).console())
    s = result.system
    console.print(
        f"{s['cpu']}, {s['threads']} threads, {s['path']} ({s['isa']}), {s['dtype']} storage, "
        f"{s['arithmetic']} arithmetic"
    )
    console.print(f"Here {expectation(result.costs)}", soft_wrap=True)
    console.print("tok/s and speedup: medians over the prompts by the wall clock [95 % intervals]")
    console.print("repeated: share of 8-grams that stood earlier in the same text; loops flatter every drafter")
    if demo.others:
        lengths = f"{CHAINS[0]} to {CHAINS[-1]}"
        console.print(f"chain: the fastest of K={lengths} on {len(demo.others)} other prompts")
    _show_answer(console, next(run for run in reversed(result.runs) if run.drafting.is_adaptive), result, llm)


def _row(run: DemoRun) -> list[str]:
    """The cells of a setting, by COLUMNS."""
    row = run.as_dict()
    identical = "yes" if run.is_identical else "NO"
    return [
        run.title, f"{run.temperature:g}", estimate(run.rates).whole(), run.speedup.times(),
        f"{row['tau']:.2f}", " ".join(f"{p:.2f}" for p in run.counters.per_position[:SHOWN]) or NO_FIGURE,
        f"{row['repeated_share']:.0%}", identical if run.drafting.is_speculative else NO_FIGURE,
    ]  # fmt: skip


def _show_answer(console: Console, run: DemoRun, result: DemoResult, llm: LLM) -> None:
    output, prompt = run.outputs[0], result.demo.prompts[0]
    assert llm.models.tokenizer is not None, "known pairs have tokenizers"
    console.print(f"\n{prompt.question or prompt.source}", style="bold", soft_wrap=True, markup=False)
    console.print(coloured(console, pieces_of(output, llm.models.tokenizer)), soft_wrap=True)
    console.print(f"\n{run.title}, temperature {run.temperature:g}; ", end="")
    console.print(legend(console, shares_of(output.sources)), soft_wrap=True)

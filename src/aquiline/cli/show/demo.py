"""What the bundled pair did, in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from aquiline.bench.data.prompts import Prompt
from aquiline.bench.results.intervals import estimate
from aquiline.bench.suite.demo import SETTINGS, TEMPERATURES, DemoResult, Run, run_demo
from aquiline.cli.options import wide_console
from aquiline.engine.llm import LLM


def run_shown(llm: LLM, prompts: list[Prompt], is_shown: bool) -> DemoResult:
    """Run the demo with a bar on standard error."""
    with Progress(console=Console(stderr=True), disable=not is_shown, transient=True) as progress:
        task = progress.add_task("generating", total=len(prompts) * len(SETTINGS) * len(TEMPERATURES))
        return run_demo(llm, prompts, lambda: progress.advance(task))


def show_demo(result: DemoResult, llm: LLM) -> None:
    """Print speed and acceptance of every setting, and one completion with the draft's tokens in colour."""
    console = wide_console()
    num_tokens = len(result.runs[0].outputs[0].token_ids)
    table = Table(title=f"{len(result.prompts)} held-out prompts, {num_tokens} new tokens each")
    for column in ("setting", "temp", "tok/s", "speedup", "tau", "accepted by position", "repeated", "same text"):
        table.add_column(column, justify="left" if column in ("setting", "accepted by position") else "right")
    for run in result.runs:
        baseline = result.baseline(run.temperature)
        row = run.as_dict(baseline)
        identical = "yes" if result.is_identical(run) else "NO"
        table.add_row(
            _describe(run), f"{run.temperature:g}", estimate(run.rates).whole(), run.speedup(baseline).times(),
            f"{row['tau']:.2f}", " ".join(f"{p:.2f}" for p in run.counters.per_position),
            f"{row['repeated_share']:.0%}", identical if run.spec.is_speculative else "-",
        )  # fmt: skip
    console.print(table)
    s = result.system
    console.print(
        f"{s['cpu']}, {s['threads']} threads, {s['path']} ({s['isa']}), {s['dtype']} storage, "
        f"{s['arithmetic']} arithmetic"
    )
    console.print("tok/s and speedup: medians over the prompts by the wall clock [95 % intervals]")
    console.print("repeated: share of 8-grams that stood earlier in the same text; loops flatter every drafter\n")
    drafted = [run for run in result.runs if run.spec.is_speculative]
    _show_completion(console, max(drafted, key=lambda run: (run.temperature, estimate(run.rates).value)), result, llm)


def _show_completion(console: Console, run: Run, result: DemoResult, llm: LLM) -> None:
    output = run.outputs[0]
    assert llm.models.tokenizer is not None
    text = Text()
    for token, by_draft in zip(output.token_ids, output.by_draft, strict=True):
        text.append(llm.models.tokenizer.decode([token]), style="green" if by_draft else "bold magenta")
    console.print(
        Text.assemble(
            f"{result.prompts[0].source}, {_describe(run)}, temperature {run.temperature:g}: written by the ",
            ("draft", "green"), " and the ", ("target", "bold magenta"), "\n",
        )
    )  # fmt: skip
    console.print(text, soft_wrap=True)


def _describe(run: Run) -> str:
    spec = run.spec
    if not spec.is_speculative:
        return run.name
    is_chain = spec.max_nodes == spec.max_depth + 1
    return run.name + (f" K={spec.max_depth}" if is_chain else f" N={spec.max_nodes}")

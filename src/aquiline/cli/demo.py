"""`aquiline demo`: the bundled pair, the same text with and without speculation, and how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import Arithmetic, wide_console

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.bench.suite.demo import DemoResult, Run
    from aquiline.engine.llm import LLM


def demo(
    package: Annotated[
        str | None, typer.Option(help="Take the prompts from this installed package (not one it was trained on).")
    ] = None,
    arithmetic: Arithmetic = "auto",
    plot: Annotated[Path | None, typer.Option(help="Also write the result as a PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Run the bundled pair on held-out code: baseline, chain and tree, greedy and sampled, and compare every token.

    Exits with 1 if speculation changed a token.

    Examples:

      aquiline demo

      aquiline demo --package networkx --json
    """
    from rich.console import Console
    from rich.progress import Progress

    from aquiline.bench.data.prompts import package_prompts, read_prompts
    from aquiline.bench.suite.demo import SETTINGS, TEMPERATURES, run_demo
    from aquiline.bench.suite.plot import plot_demo
    from aquiline.config import EngineConfig
    from aquiline.engine.bundled import BUNDLED_PROMPTS
    from aquiline.engine.llm import LLM

    llm = LLM(arithmetic=arithmetic, engine=EngineConfig(max_batch=1, prefix_cache=False))
    assert llm.models.tokenizer is not None, "the bundled pair has a tokenizer"
    prompts = package_prompts(package, llm.models.tokenizer) if package else read_prompts(BUNDLED_PROMPTS)
    console = wide_console()
    with Progress(console=Console(stderr=True), disable=as_json, transient=True) as progress:
        task = progress.add_task("generating", total=len(prompts) * len(SETTINGS) * len(TEMPERATURES))
        result = run_demo(llm, prompts, lambda: progress.advance(task))
    if plot is not None:
        plot_demo(result, plot)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        _show(console, result, llm)
    if not result.identical:
        raise typer.Exit(1)


def _show(console: Console, result: DemoResult, llm: LLM) -> None:
    from rich.table import Table

    from aquiline.bench.results.intervals import estimate

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
    from rich.text import Text

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

"""`aquiline bench`: the scenarios, and `aquiline bench table`: their results as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.options import DefaultGroup, ListCommand, wide_console

if TYPE_CHECKING:
    from aquiline.bench.suite.scenarios import Load

MODEL = "Model"


def bench(
    out: Annotated[Path, typer.Option(help="Directory of results, one JSON each; what is there is not run again.")],
    profile: Annotated[str, typer.Option(help="cpu: contexts a CPU can run; full: 8K to 32K.")] = "cpu",
    scenario: Annotated[
        list[str] | None, typer.Option(help="Only these: baseline single batch large-context stress long.")
    ] = None,
    contexts: Annotated[
        list[int] | None,
        typer.Option(help="These contexts, in tokens, with every batch; beside --scenario: only these of its own."),
    ] = None,
    batches: Annotated[list[int] | None, typer.Option(help="These batches, in the same way.")] = None,
    num_spec_tokens: Annotated[list[int] | None, typer.Option(help="Chains to compare. Default: 2 3 4 5.")] = None,
    temperature: Annotated[list[float] | None, typer.Option(help="Default: 0.")] = None,
    micro_steps: Annotated[int, typer.Option(help="Decode steps of the baseline; all settings write as much.")] = 128,
    warmup_runs: Annotated[int, typer.Option(help="Runs of every setting that do not count.")] = 1,
    measurement_runs: Annotated[
        int, typer.Option(help="Runs of every setting that do; from 6 on medians have intervals.")
    ] = 6,
    text: Annotated[
        str | None, typer.Option(help="Prompts from this file, folder or package. Default: standard library.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Default: bundled.", rich_help_panel=MODEL)] = None,
    draft: Annotated[str | None, typer.Option(help="EAGLE-3 draft.", rich_help_panel=MODEL)] = None,
    random_weights: Annotated[
        str | None, typer.Option(help="A config.json: random weights of its shapes.", rich_help_panel=MODEL)
    ] = None,
    simulate_tau: Annotated[
        float | None, typer.Option(help="Acceptance length for random weights. Default: 2.5.", rich_help_panel=MODEL)
    ] = None,
    dtype: Annotated[str, typer.Option(help="Storage of weights and KV.", rich_help_panel=MODEL)] = "bfloat16",
    arithmetic: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=MODEL)] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as one JSON list.")] = False,
) -> None:
    """Measure scenarios, baseline and chains in turn, another first in every round, and write one JSON per setting.

    Contexts are real tokens of real text, prefilled once per scenario; every setting's output equals the baseline's. On
    the cpu profile the bundled pair runs up to 2K, and random weights with a simulated acceptance length 8K to 64K.

    Examples:

      aquiline bench --out results/

      aquiline bench --out results/ --scenario single batch --num-spec-tokens 2 3 --temperature 0 0.8

      aquiline bench --out results/ --contexts 512 2048 --batches 1 4 --micro-steps 64

      aquiline bench table results/ --older results-of-last-week/
    """
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import TimeRemainingColumn

    from aquiline.bench.suite.scenarios import RANDOM, SIMULATED_TAU, Source, random_config
    from aquiline.bench.suite.suite import Plan, Progress, run_suite

    if simulate_tau is not None and random_weights is None:
        raise ValueError(f"simulate_tau={simulate_tau}: goes with --random-weights; a real draft has its own tau")
    config = random_config(random_weights) if random_weights is not None else None
    tau = simulate_tau or SIMULATED_TAU
    source = Source(target, draft, dtype, arithmetic, config, tau if config is not None else None)
    plan = Plan(
        _loads(profile, scenario, contexts, batches), profile,
        num_spec_tokens=tuple(num_spec_tokens or (2, 3, 4, 5)), temperatures=tuple(temperature or (0.0,)),
        micro_steps=micro_steps, warmup_runs=warmup_runs, measurement_runs=measurement_runs, text_source=text,
    )  # fmt: skip
    found = []
    with Bar(
        *Bar.get_default_columns()[:-1], TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        progress = Progress()

        def start(name: str, runs: int) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=runs)
            progress.advance = lambda: bar.advance(task)

        progress.start = start
        random_source = source if config is not None else Source(
            dtype=dtype, arithmetic=arithmetic, random_config=RANDOM, simulated_tau=SIMULATED_TAU
        )  # fmt: skip
        for result in run_suite(plan, source, random_source, out, progress):
            found.append(result)
            if not as_json:
                bar.console.print(_line(result), soft_wrap=True)
    for line in progress.skipped:
        Console(stderr=True).print(f"aquiline: not run: {line}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(found))
    if progress.skipped:
        raise typer.Exit(1)


def _loads(
    profile: str, names: list[str] | None, contexts: list[int] | None, batches: list[int] | None
) -> tuple[Load, ...]:
    from aquiline.bench.suite.scenarios import PROFILES, Load

    if profile not in PROFILES:
        raise ValueError(f"profile={profile!r}: must be one of {', '.join(PROFILES)}")
    loads = PROFILES[profile]
    unknown = set(names or ()) - {load.name for load in loads}
    if unknown:
        raise ValueError(f"scenario={sorted(unknown)}: must be of {', '.join(dict.fromkeys(x.name for x in loads))}")
    if not names and (contexts or batches):
        return tuple(Load("custom", c, b) for c in contexts or (512,) for b in batches or (1,))
    found = tuple(
        load
        for load in loads
        if (not names or load.name in names)
        and (not contexts or load.context in contexts)
        and (not batches or load.batch in batches)
    )
    if not found:
        raise ValueError(f"scenario={names}: none has contexts={contexts}, batches={batches} in profile {profile!r}")
    return found


def _line(result: dict[str, object]) -> str:
    r: dict[str, dict[str, float]] = result  # type: ignore[assignment]
    s, speculation = r["scenario"], r["eagle_speculation"]
    label = " (simulated)" if r["model"]["simulated_tau"] else ""
    return (
        f"{s['name']} {s['context_tokens']} x {s['batch']}, t={s['temperature']:g}, {r['setting']['name']}: "
        f"{r['throughput_tokens_per_sec']['median']:.0f} tok/s, tau {speculation['mean_acceptance_length']:.2f}{label}"
    )


def table(
    directory: Annotated[Path, typer.Argument(help="Directory of results.")],
    older: Annotated[Path | None, typer.Option(help="Mark regressions against the results of this directory.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    short: Annotated[
        bool, typer.Option("--short", help="Markdown of one row per scenario; only results of committed source.")
    ] = False,
) -> None:
    """Tabulate results: speed, tau and share of the ideal by setting, one table per scenario and machine.

    Exits with 1 if something became slower than the older results beyond their noise.

    Examples:

      aquiline bench table results/

      aquiline bench table results/ --markdown > results.md

      aquiline bench table results/ --older results-of-last-week/
    """

    from aquiline.bench.results import table as tables
    from aquiline.bench.results.result import read_results
    from aquiline.bench.results.summary import summary

    found, before = read_results(directory), read_results(older) if older is not None else None
    if short:
        print(summary(found), end="")
    elif markdown:
        print(tables.markdown(found, before))
    else:
        wide_console().print(tables.console(found, before))
    if tables.report(found, before).regressions:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add `bench` with its subcommand to the application."""
    group = typer.Typer(cls=DefaultGroup, help="Measure scenarios (run, the default) and tabulate results (table).")
    group.command("run", cls=ListCommand)(bench)
    group.command("table")(table)
    app.add_typer(group, name="bench")

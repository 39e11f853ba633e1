"""Results of scenarios as they come: a bar on standard error, a line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TimeRemainingColumn

from aquiline.bench.results.result import Result
from aquiline.bench.suite.suite import Progress


@contextmanager
def shown_progress() -> Iterator[tuple[Progress, Console]]:
    """What a suite tells of its progress, and a console whose lines stand above the bar."""
    stderr = Console(stderr=True)
    with Bar(*Bar.get_default_columns()[:-1], TimeRemainingColumn(), console=stderr, transient=True) as bar:

        def start(name: str, runs: int) -> None:
            for task in bar.task_ids:
                bar.remove_task(task)
            task = bar.add_task(name, total=None)  # moves to and fro while models load and prompts are computed
            progress.advance = lambda: bar.update(task, total=runs, advance=1)

        progress = Progress(start)
        yield progress, bar.console
    for line in progress.skipped:
        stderr.print(f"aquiline: not run: {line}", markup=False, soft_wrap=True)


def line_of(r: Result) -> str:
    """A result in one line."""
    s, speculation = r["scenario"], r["eagle_speculation"]
    label = " (simulated)" if r["model"]["simulated_tau"] else ""
    return (
        f"{s['name']} {s['context_tokens']} x {s['batch']}, t={s['temperature']:g}, {r['setting']['name']}: "
        f"{r['throughput_tokens_per_sec']['median']:.0f} tok/s, tau {speculation['mean_acceptance_length']:.2f}{label}"
    )

"""A bar for many requests: how many are done, tokens per second, tau, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aquiline.engine.engine import Engine


class RequestProgress:
    """Shows the requests an engine finishes, on stderr, and leaves nothing behind."""

    def __init__(self, total: int, engine: Engine, is_shown: bool, num_done: int = 0) -> None:
        self.engine = engine
        self.bar = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(), console=Console(stderr=True), disable=not is_shown, transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=total, completed=num_done, figures="")

    def __enter__(self) -> RequestProgress:
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self) -> None:
        """One more request has finished."""
        if self.bar.disable:
            return
        summary = self.engine.meter.summary()
        figures = f"{summary.tokens_per_s:.0f} tok/s, tau {summary.counters.tau:.2f}"
        self.bar.update(self.task, advance=1, figures=figures)

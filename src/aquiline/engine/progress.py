"""The progress of many requests: the number done, tokens per second, tau if there are drafts, and the time left."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from aquiline.engine.engine import Engine
from aquiline.metrics import Counters

BAR_EVERY_S, LINE_EVERY_S = 0.5, 30.0


class RequestProgress:
    """Shows on stderr how many of `total` pieces of work an engine has done; num_done were done before this run.

    In a terminal it is a bar that disappears at the end, elsewhere a line every 30 seconds."""

    def __init__(self, total: int, engine: Engine, is_shown: bool, num_done: int = 0) -> None:
        self.engine, self.total, self.num_done, self.num_before = engine, total, num_done, num_done
        console = Console(stderr=True)
        self.is_shown, self.is_bar = is_shown, is_shown and console.is_terminal
        self.bar = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(), console=console, disable=not self.is_bar, transient=True,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=total, completed=num_done, figures="")
        self.began_s = self.shown_s = time.monotonic()
        self.before = Counters()

    def __enter__(self) -> RequestProgress:
        self.bar.start()
        self.began_s = self.shown_s = time.monotonic()
        self.before = self._counted()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.stop()

    def advance(self) -> None:
        """One more piece of work is done."""
        self.num_done += 1
        if self.is_bar:
            self.bar.update(self.task, advance=1)
        self.tick()

    def tick(self, event: object = None) -> None:
        """Show the figures again if an update is due. May be called for every token; `event` is ignored."""
        now = time.monotonic()
        if not self.is_shown or now - self.shown_s < (BAR_EVERY_S if self.is_bar else LINE_EVERY_S):
            return
        self.shown_s = now
        if self.is_bar:
            self.bar.update(self.task, figures=self._figures(now))
        else:
            self.note(f"{self.num_done}/{self.total} done, {self._figures(now)}, {self._left(now)} left")

    def note(self, text: str) -> None:
        """Print a separate line, above the bar if there is one."""
        self.bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _figures(self, now: float) -> str:
        """Tokens per second of this run, including unfinished requests, and tau."""
        counters = self._counted().minus(self.before)
        speed = (counters.num_committed + counters.num_prefilled) / (now - self.began_s)
        return f"{speed:.0f} tok/s" + (f", tau {counters.tau:.2f}" if counters.num_draft_tokens else "")

    def _counted(self) -> Counters:
        """All that the engine has counted, sequences that still run included."""
        counters = Counters()
        for own in (self.engine.meter.counters, *(sequence.counters for sequence in self.engine.sequences.values())):
            counters.merge(own)
        return counters

    def _left(self, now: float) -> str:
        num_new = self.num_done - self.num_before
        if not num_new:
            return "unknown time"
        return str(timedelta(seconds=round((self.total - self.num_done) * (now - self.began_s) / num_new)))

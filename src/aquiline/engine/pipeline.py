"""Steps between their issue and their commit: one queue, and one rule for when it is filled and emptied.

A backend keeps each slot's tokens itself, so a step does not need the last outcome from the host. Two things follow.

- *Late*: on an asynchronous backend step n + 1 is issued before step n is read, so the device never waits for the host.
- *Repeated*: on a synchronous backend one call runs short decode steps several times (`Backend.repeat`), since Python
  between the kernels of a small model finds nothing of its own in the caches. Their outcomes are committed one at a
  time, as if each had just been computed.

The rule: `lag` outcomes stay unread after a step of the engine, 1 where outcomes are read late, else 0. A step is
issued while no more than `lag` wait; the oldest is committed once more than `lag` wait, or if nothing can be issued.
A sequence that drafts on the host needs its last tokens, so a late outcome is then committed before the next issue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from aquiline.backends.base import Backend, StepInput
from aquiline.engine.scheduler import StepPlan
from aquiline.engine.sequence import Sequence
from aquiline.engine.step import Step


class Pipeline:
    """The steps that were issued and are not committed yet, oldest first (`unread`).

    last: the step that was committed last or, where outcomes are read late, issued last."""

    def __init__(self, is_late: bool) -> None:
        self.is_late = is_late
        self.lag = int(self.is_late)
        self.unread: deque[Step] = deque()
        self.last: Step | None = None
        self.unspent_s = 0.0

    @property
    def is_ahead(self) -> bool:
        """Whether the next outcome has been computed together with an earlier one."""
        return len(self.unread) > self.lag

    def must_read_first(self, running: Iterable[Sequence | None]) -> bool:
        """Whether the next plan needs the outcome that is still unread: a proposer on the host reads tokens."""
        return self.is_late and bool(self.unread) and any(s is not None and s.proposer is not None for s in running)

    def issue(self, backend: Backend, plan: StepPlan, message: StepInput, most: int) -> int:
        """Hand a step to the backend, which may repeat its decodes up to `most` times. Returns how often it ran.

        Admissions, pages and extends come before the decodes, so they belong to the first of repeated steps."""
        outcomes = backend.repeat(message, most)
        for outcome in outcomes:
            self.unread.append(Step(plan, message, outcome))
            if len(outcomes) > 1:
                plan, message = plan._replace(admitted=()), message._replace(chunks=(), admits=(), pages=(), extends=())
        if self.is_late:
            self.last = self.unread[-1]
        return len(outcomes)

    def take(self, was_issued: bool) -> Step | None:
        """The oldest step, if it is to be committed now. Where outcomes are read at once, `unspent_s` then says by how
        many seconds this step of the engine began before its first instruction ran: those of an outcome that an earlier
        call computed, less those of outcomes that this call computed for later steps."""
        if len(self.unread) <= self.lag and (was_issued or not self.unread):
            return None
        step = self.unread.popleft()
        if not self.is_late:
            self.last = step
            later = sum(other.seconds or 0.0 for other in self.unread) if was_issued else 0.0
            self.unspent_s = -later if was_issued else step.seconds or 0.0
        return step

    def drain(self) -> None:
        """Wait for every outcome, and drop it."""
        while self.unread:
            self.unread.popleft().read()

"""The result of a regeneration: rows by outcome, answers by temperature, speed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aquiline.metrics import RunSummary


@dataclass
class Tally:
    """Sums over conversations: answers, their tokens (stop tokens included) and how they ended."""

    num_conversations: int = 0
    num_answers: int = 0
    num_answer_tokens: int = 0
    num_tokens: int = 0  # prompts and templates included
    finish_reasons: Counter[str] = field(default_factory=Counter)

    def add(self, row: dict[str, Any]) -> None:
        """Count one row of the output."""
        self.num_conversations += 1
        self.num_answers += len(row["finish_reasons"])
        self.num_answer_tokens += sum(row["loss_mask"])
        self.num_tokens += len(row["token_ids"])
        self.finish_reasons.update(row["finish_reasons"])

    @property
    def mean_answer_tokens(self) -> float:
        """Mean tokens of an answer; 0 without answers."""
        return self.num_answer_tokens / self.num_answers if self.num_answers else 0.0

    def as_dict(self) -> dict[str, object]:
        """The sums as JSON."""
        return {
            "num_conversations": self.num_conversations,
            "num_answers": self.num_answers,
            "num_answer_tokens": self.num_answer_tokens,
            "mean_answer_tokens": round(self.mean_answer_tokens, 1),
            "num_tokens": self.num_tokens,
            "finish_reasons": dict(self.finish_reasons),
        }


@dataclass(frozen=True)
class Regenerated:
    """The outcome of every row of the data: num_done + num_failed + num_skipped = num_rows.

    num_done: rows in the output; num_resumed of them are from earlier runs. num_failed: broken rows, and rows whose
    logits are not numbers. skipped, by reason: rows that were not asked for or do not fit. num_shortened: rows that are
    done but lack their last turns. reasons: "FILE line N: why" for rows of this run that lack an answer, up to
    NUM_REPORTED. total and by_temperature: sums over the whole output. answer_tokens, seconds and summary: of this run
    only."""

    num_rows: int
    num_done: int
    num_resumed: int
    num_failed: int
    skipped: dict[str, int]
    num_shortened: int
    reasons: list[str]
    total: Tally
    by_temperature: dict[float, Tally]
    answer_tokens: int
    seconds: float
    summary: RunSummary

    @property
    def num_skipped(self) -> int:
        """Rows that were not asked for or do not fit."""
        return sum(self.skipped.values())

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens per second of the run. Prompt tokens are not counted, the time for them is."""
        return self.answer_tokens / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, object]:
        """The figures as JSON."""
        return {
            "num_rows": self.num_rows,
            "num_done": self.num_done,
            "num_failed": self.num_failed,
            "num_skipped": self.num_skipped,
            "num_resumed": self.num_resumed,
            "num_shortened": self.num_shortened,
            "skipped": self.skipped,
            "reasons": self.reasons,
            "output": self.total.as_dict(),
            "by_temperature": {f"{t:g}": tally.as_dict() for t, tally in sorted(self.by_temperature.items())},
            "answer_tokens": self.answer_tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "metrics": self.summary.as_dict(),
        }

    def __str__(self) -> str:
        why = ", ".join(f"{count} {reason}" for reason, count in self.skipped.items())
        lines = [
            f"{self.num_rows} rows = {self.num_done} done ({self.num_resumed} by earlier runs) + {self.num_failed} "
            f"failed + {self.num_skipped} skipped{why and f' ({why})'}",
            f"{self.answer_tokens} answer tokens in {self.seconds:.1f} s: {self.tokens_per_s:.0f} tok/s; "
            f"{self.summary.slots_line}",
        ]
        for temperature, tally in sorted(self.by_temperature.items()):
            ends = ", ".join(f"{count} {reason}" for reason, count in tally.finish_reasons.most_common())
            lines.append(
                f"temperature {temperature:g}: {tally.num_conversations} conversations, {tally.num_answers} answers of "
                f"{tally.mean_answer_tokens:.0f} tokens on average ({ends})"
            )
        return "\n".join(lines)

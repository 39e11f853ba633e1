"""What `aquiline vocab` serves drafts on. Apart from pruning.py, so that help texts load no engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from aquiline.settings import setting

MEASURING = "Measuring"


@dataclass(frozen=True)
class PruningWork:
    """What drafts are served on; rounds: how often each of them, in turn."""

    questions: Path | None = setting(
        None, "Questions that drafts are served on, in any format of `aquiline eval`. Default: a known pair's own.",
        MEASURING,
    )  # fmt: skip
    num_questions: int = setting(12, "The number of questions; 0 measures nothing.", MEASURING)
    new_tokens: int = setting(96, "Tokens of each answer.", MEASURING)
    rounds: int = setting(3, "Runs of each draft on each question, by turns; the median counts.", MEASURING)

    def __post_init__(self) -> None:
        for name, least in (("num_questions", 0), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least {least}")

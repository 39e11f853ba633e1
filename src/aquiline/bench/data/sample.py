"""Questions as a user names them. Knows no file: datasets.py reads them."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.settings import setting

DATA = "Questions"
"""The heading under which settings are listed."""


@dataclass(frozen=True)
class Sample:
    """Questions as a user names them: those of a data set, or `count` of them."""

    dataset: str | None = setting(
        None, "mt_bench, gsm8k, humaneval, alpaca, spec_bench, a JSONL, JSON or .txt file, or "
        "hf://datasets/OWNER/NAME/FILE. Default: held-out prompts: a known pair's own, else the bundled ones.", DATA,
    )  # fmt: skip
    count: int | None = setting(None, "Exactly so many questions, the first. Default: all.", DATA)
    sample_seed: int | None = setting(None, "With --count: a sample by this seed.", DATA)

    def __post_init__(self) -> None:
        if self.sample_seed is not None and self.count is None:
            raise ValueError(f"sample_seed={self.sample_seed}: samples --count questions; give --count")

"""Settings of a regeneration: which rows are answered and how each is drawn."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aquiline.checks import check_fields
from aquiline.config import SamplingParams
from aquiline.settings import about, setting

ROWS, SAMPLING = "Which rows", "How answers are drawn"
"""Headings under which settings are listed."""

DEFAULT_TEMPERATURES, DEFAULT_WEIGHTS = (0.0, 0.8, 1.0), (0.4, 0.4, 0.2)
"""A draft serves greedy requests and others; both kinds of text are in its training data."""


@dataclass(frozen=True)
class RegenerateConfig:
    """What to answer and how. Rows are numbered from 0 over all files of `data`, empty lines apart.

    Rows are taken in an order that follows from shuffle_seed (None: as they stand), without those whose ids stand in
    the files `skip_ids`; of that order `start` rows are left out and the next `limit` taken. Raises ValueError naming
    the field, its value and the fix."""

    data: tuple[Path, ...] = field(
        metadata=about(
            "Prompts: .jsonl, .jsonl.gz or a JSON list of rows with messages, conversations (ShareGPT), turns or "
            "prompt. Every user turn is answered before the next; answers in the rows are dropped. Repeatable."
        )
    )
    out: Path = field(metadata=about("JSONL to write or to continue, a row per finished conversation."))
    temperatures: tuple[float, ...] = setting(DEFAULT_TEMPERATURES, "A row is drawn at one.", SAMPLING)
    temperature_weights: tuple[float, ...] = setting(
        DEFAULT_WEIGHTS, "Share of each; the same for all of temperatures that are given without.", SAMPLING
    )
    max_tokens: int = setting(512, "Tokens of an answer at most.", SAMPLING)
    seed: int = setting(0, "With a row's number it gives temperature and noise.", SAMPLING)
    shuffle_seed: int | None = setting(0, "Order of the rows, so that part of a run is a fair sample.", ROWS)
    skip_ids: tuple[Path, ...] = setting((), "Earlier outputs whose ids are left out; repeatable.", ROWS)
    start: int = setting(0, "Rows of the order to leave out first.", ROWS)
    limit: int | None = setting(None, "Rows to answer at most.", ROWS)

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.data:
            raise ValueError("data=(): name at least one file of prompts")
        for temperature in self.temperatures:
            SamplingParams(max_tokens=self.max_tokens, temperature=temperature)
        weights = self.temperature_weights
        if len(weights) != len(self.temperatures) or not all(0 <= w < math.inf for w in weights) or not sum(weights):
            raise ValueError(
                f"temperature_weights={weights}: must be one number from 0 on per temperature of {self.temperatures}, "
                "not all of them 0"
            )
        if self.start < 0:
            raise ValueError(f"start={self.start}: must be 0 or more")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit={self.limit}: must be at least 1; leave it out for every row")

    def draw(self, row: int) -> tuple[float, int]:
        """Temperature and sampling seed of a row."""
        digest = hashlib.sha256(f"{self.seed} {row}".encode()).digest()
        at = int.from_bytes(digest[:8]) / 2**64 * sum(self.temperature_weights)
        seed = int.from_bytes(digest[8:14])  # 48 bits, which every reader of JSON keeps
        for temperature, weight in zip(self.temperatures, self.temperature_weights, strict=True):
            if at < weight:
                return temperature, seed
            at -= weight
        return self.temperatures[-1], seed


def regenerate_config(given: Mapping[str, Any], *, in_order: bool) -> RegenerateConfig:
    """The settings of a run: those given, else the defaults. Temperatures that are given without weights weigh the
    same; in_order takes the rows as they stand."""
    settings = dict(given)
    if "temperatures" in given:
        settings.setdefault("temperature_weights", (1.0,) * len(given["temperatures"]))
    if in_order:
        settings["shuffle_seed"] = None
    return RegenerateConfig(**settings)

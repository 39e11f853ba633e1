"""Settings of one training run, checked where they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path

from aquiline.checks import check_fields

LOSS_NAMES = ("ce", "kl", "lk", "lk-mix", "agree", "agree-mix")
"""The keys of losses.LOSSES, named here so that the command line need not load torch; so are the next."""
PARALLEL_NAMES = ("ddp", "fsdp")
ATTENTION_NAMES = ("fused", "sdpa", "eager", "flex")
LOG_NAMES = ("tensorboard", "wandb")

LOSS_ON = ("answers", "all")
"""Which tokens of conversations and masked rows count: those the model itself wrote, or prompts too."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. None means: derived from the target when the run starts (see `aquiline train --help`)."""

    target: Path
    data: tuple[Path, ...]
    out: Path
    held_out: tuple[Path, ...] = ()
    draft_vocab_size: int | None = None  # special tokens included; None: the target's, at most 32000
    intermediate_size: int | None = None  # None: the target's
    num_heads: int | None = None
    num_kv_heads: int | None = None
    capture: tuple[int, ...] | None = None  # None: as init says, else EAGLE-3's three layers
    norm_feedback: bool | None = None  # what init feeds back, where its checkpoint leaves that open
    draft_window: int | None = None  # positions the draft attends to, 0: all; None: as --init has it, else all
    rope_scaling: str | None = None  # of the draft's rotary embedding, as yarn:FACTOR or yarn:FACTOR:ORIGINAL
    context: int = 512
    batch_size: int = 8  # rows of all ranks together
    accumulate: int = 1  # batches of one optimizer step
    ttt_steps: int = 7
    late_share: float = 1.0  # share of positions that steps 1 .. S-1 train on
    loss: str = "ce"
    loss_on: str = "answers"
    replay: float = 1.0  # weight of a prediction of a token that a draft missed when it served
    decay: float = 0.8
    optimizer: str = "adamw"
    lr: float | None = None
    warmup: float = 0.02  # share of the run
    clip: float = 0.5
    weight_decay: float = 0.0
    steps: int | None = None
    tokens: int | None = None
    minutes: float | None = None
    epochs: float | None = None
    init: Path | None = None
    resume: bool = False
    may_differ: tuple[str, ...] = ()  # settings that a resumed run changes on purpose; see resume.py
    seed: int = 0
    log_every: int = 20
    eval_every: int = 200
    eval_rows: int = 32
    eval_tokens: int = 128  # new tokens of a held-out continuation, at most half of context
    features: Path | None = None  # folder that keeps what the target says of each document
    ema: float = 0.0  # decay of the averaged weights that are judged and saved; 0: the weights themselves
    keep: int = 2  # checkpoints; the newest
    save_every_minutes: float = 10.0  # checkpoints between looks
    parallel: str | None = None  # under torchrun; None: ddp there
    attention: str = "fused"  # implementation of the training-time test's attention; all compute the same
    log: tuple[str, ...] = ()  # where figures go beside train.jsonl

    def __post_init__(self) -> None:
        check_fields(self)
        problems = [
            f"{f.name}={value}: must be a number that is finite" for f in fields(self)
            if isinstance(value := getattr(self, f.name), float) and not math.isfinite(value)
        ]  # fmt: skip
        problems = problems or self._problems()
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> list[str]:
        least = self.ttt_steps + 3
        checks = [
            (bool(self.data), "data: name at least one file or folder"),
            (1 <= self.ttt_steps <= 16, f"ttt_steps={self.ttt_steps}: must be 1 to 16"),
            (self.context >= least, f"context={self.context}: must be at least ttt_steps + 3 = {least}"),
            (self.batch_size >= 1, f"batch_size={self.batch_size}: must be at least 1"),
            (0 < self.late_share <= 1, f"late_share={self.late_share}: must be above 0 and at most 1"),
            (self.loss in LOSS_NAMES, f"loss={self.loss!r}: must be one of {', '.join(LOSS_NAMES)}"),
            (self.loss_on in LOSS_ON, f"loss_on={self.loss_on!r}: must be one of {', '.join(LOSS_ON)}"),
            (1 <= self.replay < math.inf, f"replay={self.replay}: must be at least 1, which is no replay"),
            (self.optimizer in ("adamw", "muon"), f"optimizer={self.optimizer!r}: must be adamw or muon"),
            (self.lr is None or self.lr > 0, f"lr={self.lr}: must be above 0"),
            (0 < self.decay <= 1, f"decay={self.decay}: must be above 0 and at most 1"),
            (0 <= self.warmup < 1, f"warmup={self.warmup}: must be in [0, 1)"),
            (self.clip > 0, f"clip={self.clip}: must be above 0"),
            (self.weight_decay >= 0, f"weight_decay={self.weight_decay}: must be at least 0"),
            (not (self.init and self.resume), "init and resume: --resume already continues OUT; drop --init"),
            (self.norm_feedback is None or bool(self.init), "norm_feedback: says how to read --init; name that draft"),
            (self.log_every >= 1 and self.eval_every >= 1, "log_every and eval_every must be at least 1"),
            (0 <= self.ema < 1, f"ema={self.ema}: must be in [0, 1)"),
            (self.eval_tokens >= 2, f"eval_tokens={self.eval_tokens}: must be at least 2"),
            (self.eval_rows >= 1, f"eval_rows={self.eval_rows}: must be at least 1"),
            (self.accumulate >= 1, f"accumulate={self.accumulate}: must be at least 1"),
            (self.keep >= 1, f"keep={self.keep}: must be at least 1"),
            (self.save_every_minutes > 0, f"save_every_minutes={self.save_every_minutes}: must be above 0"),
            (self.resume or not self.may_differ, "may_differ: says what a resumed run changes; add --resume"),
        ]
        if self.draft_window:
            told = f"draft_window={self.draft_window}: must be at least ttt_steps = {self.ttt_steps}, or 0 for none"
            checks.append((self.draft_window >= self.ttt_steps, told))
        if self.rope_scaling is not None:
            told = f"rope_scaling={self.rope_scaling!r}: must be yarn:FACTOR, or yarn:FACTOR:ORIGINAL positions"
            checks.append((yarn_of(self.rope_scaling) is not None, told))
        chosen = [("parallel", self.parallel, PARALLEL_NAMES), ("attention", self.attention, ATTENTION_NAMES)]
        chosen += [("log", name, LOG_NAMES) for name in self.log]
        checks += [
            (value is None or value in names, f"{field}={value!r}: must be one of {', '.join(names)}")
            for field, value, names in chosen
        ]
        budgets = {"steps": self.steps, "tokens": self.tokens, "minutes": self.minutes, "epochs": self.epochs}
        checks += [(v is None or v > 0, f"{name}={v}: must be above 0") for name, v in budgets.items()]
        return [text for ok, text in checks if not ok]


@dataclass(frozen=True)
class Yarn:
    """A rotary embedding stretched by `factor` from `original` positions; None: those the draft was built for."""

    factor: float
    original: int | None = None


def yarn_of(text: str) -> Yarn | None:
    """What rope_scaling says; None if it says nothing that is known."""
    kind, *numbers = text.split(":")
    try:
        factor, *original = float(numbers[0]), *map(int, numbers[1:2])
    except (ValueError, IndexError):
        return None
    is_sound = kind == "yarn" and len(numbers) <= 2 and 1 < factor < 1e3 and all(n > 0 for n in original)
    return Yarn(factor, *original) if is_sound else None

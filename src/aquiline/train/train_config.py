"""Settings of one training run, checked where they are made."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path

from aquiline.checks import check_fields
from aquiline.config import parse_layers
from aquiline.settings import about, setting

LOSS_NAMES = ("ce", "kl", "lk", "lk-mix", "agree", "agree-mix")
"""The keys of losses.LOSSES, named here so that the command line need not load torch; so are the next."""
OPTIMIZER_NAMES = ("adamw", "muon")
PARALLEL_NAMES = ("ddp", "fsdp", "hsdp")
ATTENTION_NAMES = ("fused", "sdpa", "eager", "flex")
LOG_NAMES = ("tensorboard", "wandb")

STORAGES = ("bfloat16", "int8", "int4")
"""bfloat16 and ops.quantise.QUANTISED, named here for the same reason."""

LOSS_ON = ("answers", "all")
"""Which tokens of conversations and masked rows count: those the model itself wrote, or prompts too."""


SHAPE, BUDGET, BATCH = "The draft's shape", "How long", "Batches and passes"
UPDATE, HELD_OUT, KEEP, RUN = "Loss and update", "Looks at held-out text", "Checkpoints and figures", "How it runs"
"""Headings under which settings are listed."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. None means: derived from the target when the run starts."""

    target: Path = field(metadata=about("Target checkpoint: a Hugging Face folder or hub id, or a .gguf file."))
    data: tuple[Path, ...] = field(
        metadata=about(
            "What to train on, one or several: folders or files of .py/.txt/.md text; rows of conversations "
            "(messages, or ShareGPT's conversations), text or token ids (and loss_mask) in .jsonl, .jsonl.gz, .json, "
            ".parquet or .arrow; data sets of the Hugging Face hub or saved by its library, as NAME or NAME:SPLIT; "
            ".bin streams of uint16 ids split at the bos/eos id. The target's own answers train the best drafts."
        )
    )
    out: Path = field(metadata=about("Folder to write; serve the draft from it."))
    init: Path | None = setting(None, "Draft to continue from, with its vocabulary and shape.")
    keep_fusion: bool = setting(
        False, "Leave fc and its norms as --init has them, so that features that a server has fused stay valid."
    )
    resume: bool = setting(False, "Continue OUT from its newest whole checkpoint.")
    may_differ: tuple[str, ...] = setting(
        (), "Settings that --resume changes on purpose, as: data lr. The names are TrainConfig's."
    )
    seed: int = setting(0, "Batches, initial weights and sampling follow from it.")
    minutes: float | None = setting(None, "Stop after so long, loading, looks and saving included.", BUDGET)
    steps: int | None = setting(None, "Stop after so many.", BUDGET)
    tokens: int | None = setting(None, "Stop after so many.", BUDGET)
    epochs: float | None = setting(None, "Stop after so many passes over the data; 1 if no budget is given.", BUDGET)
    draft_vocab_size: int | None = setting(
        None, "Tokens the draft can name, special ones included; default: the target's, at most 32000.", SHAPE
    )
    intermediate_size: int | None = setting(None, "MLP width; default: the target's.", SHAPE)
    num_heads: int | None = setting(None, "Query heads; default: the target's.", SHAPE)
    num_kv_heads: int | None = setting(None, "Key/value heads; default: the target's.", SHAPE)
    capture: tuple[int, ...] | None = setting(
        None, "Three target layers whose outputs the draft reads, as 1,4,6; default: as --init says, else 1, L/2-1, "
        "L-4.", SHAPE, parse=parse_layers,
    )  # fmt: skip
    norm_feedback: bool | None = setting(None, "What --init feeds back, where its checkpoint leaves that open.", SHAPE)
    draft_window: int | None = setting(
        None, "Positions that the draft attends to, 0 for all; default: as --init has it, else all. A window keeps a "
        "draft good beyond the contexts it was trained on.", SHAPE,
    )  # fmt: skip
    draft_dtype: str = setting(
        "bfloat16", f"How the draft is stored where it serves: one of {', '.join(STORAGES)}. For int8 and int4 its "
        "linears are rounded so in every step, and it learns to do well with that.", SHAPE,
    )  # fmt: skip
    rope_scaling: str | None = setting(
        None, "yarn:FACTOR stretches the draft's rotary embedding from the positions it was built for; "
        "yarn:FACTOR:ORIGINAL says from how many.", SHAPE,
    )  # fmt: skip
    context: int = setting(512, "Tokens per training row; near what will be served is best.", BATCH)
    batch_size: int = setting(8, "Rows of a batch, of all ranks together.", BATCH)
    accumulate: int = setting(1, "Batches of one optimizer step, for less memory.", BATCH)
    ttt_steps: int = setting(7, "Passes on the draft's own outputs: the draft length to train for.", BATCH)
    late_share: float = setting(
        1.0, "Share of positions that passes after the first train on; 0.25 is 1.7x faster on a CPU.", BATCH
    )
    loss: str = setting("ce", f"One of {', '.join(LOSS_NAMES)} (losses.py says which).", UPDATE)
    loss_on: str = setting(
        "answers", f"{LOSS_ON[0]}: what loss masks and the chat template say the model wrote; {LOSS_ON[1]}: prompts "
        "too.", UPDATE,
    )  # fmt: skip
    replay: float = setting(
        1.0, "Weight of tokens that the draft missed when it served, as rows of aquiline regenerate --draft say; 1: "
        "that of all others.", UPDATE,
    )  # fmt: skip
    decay: float = setting(0.8, "Weight of each pass beside the one before it.", UPDATE)
    optimizer: str = setting("adamw", "adamw, or muon (Muon inside, AdamW for head and norms).", UPDATE)
    lr: float | None = setting(
        None, "Peak learning rate; default: 0.35 / hidden size, at most 1e-3, less where a target's logits are large.",
        UPDATE,
    )  # fmt: skip
    warmup: float = setting(0.02, "Share of the run until the peak, 50 steps at least; then a cosine to 2 %.", UPDATE)
    clip: float = setting(0.5, "Largest gradient norm.", UPDATE)
    weight_decay: float = setting(0.0, "Of matrices.", UPDATE)
    ema: float = setting(0.0, "Decay of averaged weights, which are judged and saved; 0: none.", UPDATE)
    held_out: tuple[Path, ...] = setting(
        (), "Documents to judge by; default: one in 20, chosen by its name's hash.", HELD_OUT
    )
    eval_every: int = setting(200, "Steps between looks; each saves a checkpoint.", HELD_OUT)
    eval_rows: int = setting(32, "Held-out prompts that the target continues.", HELD_OUT)
    eval_tokens: int = setting(128, "New tokens of each continuation, at most half of context.", HELD_OUT)
    keep: int = setting(2, "Newest checkpoints to keep.", KEEP)
    save_every_minutes: float = setting(10.0, "Checkpoints between looks.", KEEP)
    log_every: int = setting(20, "Steps between lines.", KEEP)
    log: tuple[str, ...] = setting((), f"Send figures to {' and '.join(LOG_NAMES)} too.", KEEP)
    features: Path | None = setting(
        None, "Folder that keeps what the target says of each document, for later epochs and runs.", RUN
    )
    attention: str = setting("fused", f"Of the passes, the same values: {', '.join(ATTENTION_NAMES)}.", RUN)
    parallel: str | None = setting(
        None,
        "Under torchrun: ddp, or fsdp (the draft and its optimizer split over the ranks), or hsdp (over those of "
        "each node).",
        RUN,
    )

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
        checks = [*self._ranges(), *self._choices()]
        checks += [
            (bool(self.data), "data: name at least one file or folder"),
            (
                self.rope_scaling is None or yarn_of(self.rope_scaling) is not None,
                f"rope_scaling={self.rope_scaling!r}: must be yarn:FACTOR, or yarn:FACTOR:ORIGINAL positions",
            ),
            (not (self.init and self.resume), "init and resume: --resume already continues OUT; drop --init"),
            (self.norm_feedback is None or bool(self.init), "norm_feedback: says how to read --init; name that draft"),
            (bool(self.init) or self.resume or not self.keep_fusion, "keep_fusion: needs a draft to keep; name --init"),
            (self.resume or not self.may_differ, "may_differ: says what a resumed run changes; add --resume"),
        ]
        return [text for ok, text in checks if not ok]

    def _ranges(self) -> list[tuple[bool, str]]:
        """Whether each number is in its range, and what to say if not. None is a number that is left open."""
        least, passes = self.ttt_steps + 3, self.ttt_steps
        ranges: list[tuple[str, Callable[[float], bool], str]] = [
            ("ttt_steps", lambda v: 1 <= v <= 16, "1 to 16"),
            ("context", lambda v: v >= least, f"at least ttt_steps + 3 = {least}"),
            ("batch_size accumulate log_every eval_every eval_rows keep", lambda v: v >= 1, "at least 1"),
            ("lr clip save_every_minutes steps tokens minutes epochs", lambda v: v > 0, "above 0"),
            ("late_share decay", lambda v: 0 < v <= 1, "above 0 and at most 1"),
            ("warmup ema", lambda v: 0 <= v < 1, "in [0, 1)"),
            ("weight_decay", lambda v: v >= 0, "at least 0"),
            ("eval_tokens", lambda v: v >= 2, "at least 2"),
            ("replay", lambda v: v >= 1, "at least 1, which is no replay"),
            ("draft_window", lambda v: v == 0 or v >= passes, f"at least ttt_steps = {passes}, or 0 for none"),
        ]
        given = [(name, getattr(self, name), fits, told) for names, fits, told in ranges for name in names.split()]
        return [(value is None or fits(value), f"{name}={value}: must be {told}") for name, value, fits, told in given]

    def _choices(self) -> list[tuple[bool, str]]:
        """Whether each name is one of those there are, and what to say if not. None is a name that is left open."""
        chosen = [
            ("loss", self.loss, LOSS_NAMES), ("loss_on", self.loss_on, LOSS_ON),
            ("optimizer", self.optimizer, OPTIMIZER_NAMES), ("parallel", self.parallel, PARALLEL_NAMES),
            ("attention", self.attention, ATTENTION_NAMES), ("draft_dtype", self.draft_dtype, STORAGES),
            *(("log", name, LOG_NAMES) for name in self.log),
        ]  # fmt: skip
        return [
            (value is None or value in names, f"{field}={value!r}: must be one of {', '.join(names)}")
            for field, value, names in chosen
        ]


@dataclass(frozen=True)
class Yarn:
    """A rotary embedding stretched by `factor` from `original` positions; None: those the draft was built for."""

    factor: float
    original: int | None = None


def yarn_of(text: str) -> Yarn | None:
    """The stretch that a value of rope_scaling names; None if the value has another form."""
    kind, *numbers = text.split(":")
    try:
        factor, *original = float(numbers[0]), *map(int, numbers[1:2])
    except (ValueError, IndexError):
        return None
    is_sound = kind == "yarn" and len(numbers) <= 2 and 1 < factor < 1e3 and all(n > 0 for n in original)
    return Yarn(factor, *original) if is_sound else None

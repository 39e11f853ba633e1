"""`aquiline train`: options to a TrainConfig, the result to stdout. No logic lives here.

An option that is not given has the recipe's value, else TrainConfig's own default.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from aquiline.train.config import ATTENTION_NAMES, LOG_NAMES, LOSS_NAMES, LOSS_ON, PARALLEL_NAMES
from aquiline.train.config import TrainConfig as C

SHAPE, BUDGET, BATCH = "The draft's shape", "How long", "Batches and passes"
UPDATE, HELD_OUT, KEEP, RUN = "Loss and update", "Looks at held-out text", "Checkpoints and figures", "How it runs"

EXAMPLES = """
Examples:

  aquiline train --target ./target --data ./src ./docs --out ./draft --minutes 45

  aquiline train --target ./target --data answers.jsonl --held-out held_out.jsonl --out ./draft --context 1024

  aquiline train --target ./target --data OWNER/NAME:train_sft --out ./draft --loss-on all --epochs 2

  aquiline train --recipe smollm2-135m --data answers.jsonl --out ./draft --features ./features --log tensorboard

  aquiline train --recipe gpt-oss-120b --dry-run

  aquiline train --target ./target --data own_text.jsonl --out ./draft2 --init ./draft --minutes 15

  aquiline train --target ./target --data long.jsonl --out ./draft-window --init ./draft --draft-window 512

  aquiline train --target ./target --data long.jsonl --out ./draft-yarn --init ./draft --rope-scaling yarn:8:512

  aquiline train --target ./target --data served.jsonl --out ./draft2 --init ./draft --replay 2

  aquiline train --target ./target --data corpus.bin --held-out held.bin --out ./draft --steps 5000 --resume

OUT holds the best draft (SpecForge layout), OUT/step-NNNNNNN the newest with what --resume needs, train.jsonl and
train.png. --resume wants the settings and data of the run it continues, and ends with the weights that the unbroken run
would have; another budget is taken with a notice. The learning rate follows the share of the budget that is used, so
after a run of 3 million tokens `--resume --tokens 10000000` goes on at the rate of 30 % of a run of 10 million.

Several processes: `torchrun --nproc-per-node N --no-python aquiline train ...`; each takes its share of every batch.
"""


def train(
    ctx: typer.Context,
    target: Annotated[
        Path | None, typer.Option(help="Target checkpoint: a Hugging Face folder or hub id, or a .gguf file.")
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="What to train on, one or several: folders or files of .py/.txt/.md text; rows of conversations "
            "(messages, or ShareGPT's conversations), text or token ids (and loss_mask) in .jsonl, .jsonl.gz, .json, "
            ".parquet or .arrow; data sets of the Hugging Face hub or saved by its library, as NAME or NAME:SPLIT; "
            ".bin streams of uint16 ids split at the bos/eos id. The target's own answers train the best drafts."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; serve the draft from it.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Target and settings from a recipe: smollm2-135m, llama-3.1-8b, qwen3-8b, gpt-oss-20b, gpt-oss-120b, "
            "or a .yaml file. Options given here come first."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what the run would take (memory, time, disk) and stop.")
    ] = False,
    init: Annotated[Path | None, typer.Option(help="Draft to continue from, with its vocabulary and shape.")] = C.init,
    resume: Annotated[bool, typer.Option("--resume", help="Continue OUT from its newest whole checkpoint.")] = C.resume,
    may_differ: Annotated[
        list[str] | None,
        typer.Option(help="Settings that --resume changes on purpose, as: data lr. The names are TrainConfig's."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Batches, initial weights and sampling follow from it.")] = C.seed,
    minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so long, loading, looks and saving included.", rich_help_panel=BUDGET),
    ] = C.minutes,
    steps: Annotated[int | None, typer.Option(help="Stop after so many.", rich_help_panel=BUDGET)] = C.steps,
    tokens: Annotated[int | None, typer.Option(help="Stop after so many.", rich_help_panel=BUDGET)] = C.tokens,
    epochs: Annotated[
        float | None,
        typer.Option(help="Stop after so many passes over the data; 1 if no budget is given.", rich_help_panel=BUDGET),
    ] = C.epochs,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(help="Tokens the draft can name; default: the target's, at most 32000.", rich_help_panel=SHAPE),
    ] = C.draft_vocab_size,
    intermediate_size: Annotated[
        int | None, typer.Option(help="MLP width; default: the target's.", rich_help_panel=SHAPE)
    ] = C.intermediate_size,
    num_heads: Annotated[
        int | None, typer.Option(help="Query heads; default: the target's.", rich_help_panel=SHAPE)
    ] = C.num_heads,
    num_kv_heads: Annotated[
        int | None, typer.Option(help="Key/value heads; default: the target's.", rich_help_panel=SHAPE)
    ] = C.num_kv_heads,
    capture: Annotated[
        str | None,
        typer.Option(
            help="Three target layers whose outputs the draft reads, as 1,4,6; default: as --init says, else 1, "
            "L/2-1, L-4.",
            rich_help_panel=SHAPE,
        ),
    ] = None,
    norm_feedback: Annotated[
        bool | None,
        typer.Option(help="What --init feeds back, where its checkpoint leaves that open.", rich_help_panel=SHAPE),
    ] = C.norm_feedback,
    draft_window: Annotated[
        int | None,
        typer.Option(
            help="Positions that the draft attends to, 0 for all; default: as --init has it, else all. A window keeps "
            "a draft good beyond the contexts it was trained on.",
            rich_help_panel=SHAPE,
        ),
    ] = C.draft_window,
    rope_scaling: Annotated[
        str | None,
        typer.Option(
            help="yarn:FACTOR stretches the draft's rotary embedding from the positions it was built for; "
            "yarn:FACTOR:ORIGINAL says from how many.",
            rich_help_panel=SHAPE,
        ),
    ] = C.rope_scaling,
    context: Annotated[
        int, typer.Option(help="Tokens per training row; near what will be served is best.", rich_help_panel=BATCH)
    ] = C.context,
    batch_size: Annotated[
        int, typer.Option(help="Rows of a batch, of all ranks together.", rich_help_panel=BATCH)
    ] = C.batch_size,
    accumulate: Annotated[
        int, typer.Option(help="Batches of one optimizer step, for less memory.", rich_help_panel=BATCH)
    ] = C.accumulate,
    ttt_steps: Annotated[
        int,
        typer.Option(help="Passes on the draft's own outputs: the draft length to train for.", rich_help_panel=BATCH),
    ] = C.ttt_steps,
    late_share: Annotated[
        float,
        typer.Option(
            help="Share of positions that passes after the first train on; 0.25 is 1.7x faster on a CPU.",
            rich_help_panel=BATCH,
        ),
    ] = C.late_share,
    loss: Annotated[
        str, typer.Option(help=f"One of {', '.join(LOSS_NAMES)} (losses.py says which).", rich_help_panel=UPDATE)
    ] = C.loss,
    loss_on: Annotated[
        str,
        typer.Option(
            help=f"{LOSS_ON[0]}: what loss masks and the chat template say the model wrote; {LOSS_ON[1]}: prompts too.",
            rich_help_panel=UPDATE,
        ),
    ] = C.loss_on,
    replay: Annotated[
        float,
        typer.Option(
            help="Weight of tokens that the draft missed when it served, as rows of aquiline regenerate --draft say; "
            "1: that of all others.",
            rich_help_panel=UPDATE,
        ),
    ] = C.replay,
    decay: Annotated[
        float, typer.Option(help="Weight of each pass beside the one before it.", rich_help_panel=UPDATE)
    ] = C.decay,
    optimizer: Annotated[
        str, typer.Option(help="adamw, or muon (Muon inside, AdamW for head and norms).", rich_help_panel=UPDATE)
    ] = C.optimizer,
    lr: Annotated[
        float | None,
        typer.Option(help="Peak learning rate; default: 0.35 / hidden size, at most 1e-3.", rich_help_panel=UPDATE),
    ] = C.lr,
    warmup: Annotated[
        float, typer.Option(help="Share of the run until the peak; then a cosine to 2 %.", rich_help_panel=UPDATE)
    ] = C.warmup,
    clip: Annotated[float, typer.Option(help="Largest gradient norm.", rich_help_panel=UPDATE)] = C.clip,
    weight_decay: Annotated[float, typer.Option(help="Of matrices.", rich_help_panel=UPDATE)] = C.weight_decay,
    ema: Annotated[
        float,
        typer.Option(help="Decay of averaged weights, which are judged and saved; 0: none.", rich_help_panel=UPDATE),
    ] = C.ema,
    held_out: Annotated[
        list[Path] | None,
        typer.Option(
            help="Documents to judge by; default: one in 20, chosen by its name's hash.", rich_help_panel=HELD_OUT
        ),
    ] = None,
    eval_every: Annotated[
        int, typer.Option(help="Steps between looks; each saves a checkpoint.", rich_help_panel=HELD_OUT)
    ] = C.eval_every,
    eval_rows: Annotated[
        int, typer.Option(help="Held-out prompts that the target continues.", rich_help_panel=HELD_OUT)
    ] = C.eval_rows,
    eval_tokens: Annotated[
        int, typer.Option(help="New tokens of each continuation.", rich_help_panel=HELD_OUT)
    ] = C.eval_tokens,
    keep: Annotated[int, typer.Option(help="Newest checkpoints to keep.", rich_help_panel=KEEP)] = C.keep,
    save_every_minutes: Annotated[
        float, typer.Option(help="Checkpoints between looks.", rich_help_panel=KEEP)
    ] = C.save_every_minutes,
    log_every: Annotated[int, typer.Option(help="Steps between lines.", rich_help_panel=KEEP)] = C.log_every,
    log: Annotated[
        list[str] | None,
        typer.Option(help=f"Send figures to {' and '.join(LOG_NAMES)} too.", rich_help_panel=KEEP),
    ] = None,
    json_only: Annotated[
        bool, typer.Option("--json", help="Nothing but the JSON result.", rich_help_panel=KEEP)
    ] = False,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Folder that keeps what the target says of each document, for later epochs and runs.",
            rich_help_panel=RUN,
        ),
    ] = C.features,
    attention: Annotated[
        str,
        typer.Option(help=f"Of the passes, the same values: {', '.join(ATTENTION_NAMES)}.", rich_help_panel=RUN),
    ] = C.attention,
    parallel: Annotated[
        str | None,
        typer.Option(
            help=f"Under torchrun: {' or '.join(PARALLEL_NAMES)} (the draft and its optimizer split over the ranks).",
            rich_help_panel=RUN,
        ),
    ] = C.parallel,
) -> None:
    """Train an EAGLE-3 draft head for a target with training-time test (EAGLE-3, arXiv 2503.01840).

    Ends stdout with one JSON line: held-out loss, accuracy per step, simulated tau (tokens per step that serving the
    target's own held-out continuations would commit), tokens and seconds.
    """
    given = {name: value for name, value in locals().items() if _is_given(ctx, name)}
    from aquiline.train.estimate import announce, target_shape
    from aquiline.train.recipes import configure, read_recipe
    from aquiline.train.trainer import train as run

    found = read_recipe(recipe) if recipe else None
    config = configure(_settings(given), found, is_dry=dry_run)
    if dry_run:
        say = (lambda text: None) if json_only else partial(print, file=sys.stderr)
        result: dict[str, Any] | None = announce(config, target_shape(config, found), say)
    else:
        result = run(config, quiet=json_only)
    if result is not None:  # under torchrun the first rank alone has one
        typer.echo(json.dumps(result))


train.__doc__ = f"{train.__doc__}\n{EXAMPLES}"


def _is_given(ctx: typer.Context, name: str) -> bool:
    """Whether an option that is a field of TrainConfig stands on the command line."""
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE" and name in C.__dataclass_fields__


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """Options as TrainConfig takes them."""
    if "capture" in given:
        given["capture"] = layers(given["capture"])
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


def layers(text: str | None) -> tuple[int, ...] | None:
    """Layer indices from 1,4,6."""
    if text is None:
        return None
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"capture={text!r}: must be layer numbers separated by commas, as 1,4,6") from None
    if len(layers) != 3:
        raise ValueError(f"capture={text!r}: name three layers")
    return layers

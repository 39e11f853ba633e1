"""`aquiline train`: options to a TrainConfig, the result to stdout.

An option that is not given has the recipe's value, else TrainConfig's own default.
"""

from __future__ import annotations

import inspect
import json
import signal
import sys
from functools import partial
from typing import Annotated, Any

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.train.train_config import KEEP, TrainConfig

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

OUT holds the best draft (SpecForge layout): the one that the run began with, until a look finds a better one. Beside it
OUT/step-NNNNNNN, the newest with what --resume needs, train.jsonl and train.png. A new draft learns from hundreds of
thousands of tokens on; with fewer, go on from a trained one with --init.

Ctrl-C (SIGINT) or SIGTERM ends a run after the present step, with a checkpoint and exit code 130; a second one ends it
at once. --resume wants the settings and data of the run it continues, and ends with the weights that the unbroken run
would have; another budget is taken with a notice. The learning rate follows the share of the budget that is used, so
after a run of 3 million tokens `--resume --tokens 10000000` goes on at the rate of 30 % of a run of 10 million.

Several processes: `torchrun --nproc-per-node N --no-python aquiline train ...`; each takes its share of every batch.
"""


def _result(settings: Given[TrainConfig], recipe: str | None, is_dry: bool, is_quiet: bool) -> dict[str, Any] | None:
    """Train, or estimate a run that is dry. Returns None on ranks that are not the first."""
    try:
        from aquiline.train import estimate
        from aquiline.train.recipes import configure, read_recipe
        from aquiline.train.trainer import measure
        from aquiline.train.trainer import train as run
    except ModuleNotFoundError as error:
        raise ValueError(f"train: {error.name} is not installed; pip install 'aquiline[train]'") from None

    found = read_recipe(recipe) if recipe else None
    config = configure(settings, found, is_dry=is_dry)
    if not is_dry:
        return run(config, quiet=is_quiet)
    say = (lambda text: None) if is_quiet else partial(print, file=sys.stderr)
    steps = partial(measure, config) if "data" in settings else None
    return estimate.dry_run(config, estimate.target_shape(config, found), say, steps)


@with_options
def train(
    *,
    settings: Annotated[Given[TrainConfig], Fields(is_partial=True)],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="Target and settings from a recipe: smollm2-135m, llama-3.1-8b, qwen3-8b, gpt-oss-20b, gpt-oss-120b, "
            "or a .yaml file. Options given here come first."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what the run would take (memory, time, disk) and stop; with --data, after two measured steps.",
        ),
    ] = False,
    json_only: Annotated[
        bool, typer.Option("--json", help="Nothing but the JSON result.", rich_help_panel=KEEP)
    ] = False,
) -> None:
    """Train an EAGLE-3 draft head for a target with training-time test (EAGLE-3, arXiv 2503.01840).

    Ends stdout with one JSON line: held-out loss, accuracy per step, simulated tau (tokens per step that serving the
    target's own held-out continuations would commit), tokens and seconds.
    """
    result = _result(settings, recipe, dry_run, json_only)
    if result is not None:
        typer.echo(json.dumps(result))
        if result.get("is_stopped"):
            raise typer.Exit(128 + signal.SIGINT)


train.__doc__ = f"{inspect.getdoc(train)}\n{EXAMPLES}"

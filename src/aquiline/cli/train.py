"""`aquiline train`: options to a TrainConfig, the result to stdout. No logic lives here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.train.config import LOSS_NAMES, LOSS_ON, TrainConfig

EXAMPLES = """
Examples:

  aquiline train --target ./target --data ./src ./docs --out ./draft --minutes 45

  aquiline train --target ./target --data answers.jsonl --held-out held_out.jsonl --out ./draft --context 1024

  aquiline train --target ./target --data OWNER/NAME:train_sft --out ./draft --loss-on all --epochs 2

  aquiline train --target ./target --data own_text.jsonl --out ./draft2 --init ./draft --minutes 15

  aquiline train --target ./target --data corpus.bin --held-out held.bin --out ./draft --steps 5000 --resume

OUT holds the best draft (SpecForge layout), OUT/step-NNNNNNN the newest with what --resume needs, train.jsonl and
train.png.
"""


def train(
    target: Annotated[Path, typer.Option(help="Target checkpoint: a Hugging Face folder or hub id, or a .gguf file.")],
    data: Annotated[
        list[Path],
        typer.Option(
            help="What to train on, one or several: folders or files of .py/.txt/.md text; rows of conversations "
            "(messages, or ShareGPT's conversations), text or token ids (and loss_mask) in .jsonl, .jsonl.gz, .json, "
            ".parquet or .arrow; data sets of the Hugging Face hub or saved by its library, as NAME or NAME:SPLIT; "
            ".bin streams of uint16 ids split at the bos/eos id. The target's own answers train the best drafts."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write; serve the draft from it.")],
    held_out: Annotated[
        list[Path] | None, typer.Option(help="Documents to judge by; default: one in 20, chosen by its name's hash.")
    ] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(help="Tokens the draft can name; default: all of the target's, at most 32000.")
    ] = None,
    intermediate_size: Annotated[
        int | None, typer.Option(help="MLP width of the draft; default: the target's.")
    ] = None,
    num_heads: Annotated[int | None, typer.Option(help="Query heads of the draft; default: the target's.")] = None,
    num_kv_heads: Annotated[int | None, typer.Option(help="Key/value heads; default: the target's.")] = None,
    capture: Annotated[
        str | None,
        typer.Option(help="Three target layers whose outputs the draft reads, as 1,4,6; default: 1, L/2-1, L-4."),
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens per training row; near what will be served is best.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Rows per step.")] = 8,
    ttt_steps: Annotated[
        int, typer.Option(help="Passes on the draft's own outputs: the draft length to train for.")
    ] = 7,
    late_share: Annotated[
        float,
        typer.Option(help="Share of positions that passes after the first train on; 0.25 is 1.7x faster on a CPU."),
    ] = 1.0,
    loss: Annotated[str, typer.Option(help=f"One of {', '.join(LOSS_NAMES)}.")] = "ce",
    loss_on: Annotated[
        str,
        typer.Option(
            help=f"{LOSS_ON[0]}: what loss masks and the chat template say the model wrote; {LOSS_ON[1]}: prompts too."
        ),
    ] = LOSS_ON[0],
    optimizer: Annotated[str, typer.Option(help="adamw, or muon (Muon inside, AdamW for head and norms).")] = "adamw",
    lr: Annotated[
        float | None, typer.Option(help="Peak learning rate; default: 1.1 / hidden size, at most 3e-3.")
    ] = None,
    minutes: Annotated[float | None, typer.Option(help="Stop after so much training time.")] = None,
    steps: Annotated[int | None, typer.Option(help="Stop after so many steps.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Stop after so many passes; 1 if no budget is given.")] = None,
    init: Annotated[Path | None, typer.Option(help="Draft to continue from, with its vocabulary and shape.")] = None,
    resume: Annotated[bool, typer.Option(help="Continue the run in OUT where its last checkpoint stands.")] = False,
    seed: Annotated[int, typer.Option(help="Batches, initial weights and sampling follow from it.")] = 0,
    eval_every: Annotated[int, typer.Option(help="Steps between looks at held-out text, and checkpoints.")] = 200,
    json_only: Annotated[bool, typer.Option("--json", help="Nothing but the JSON result.")] = False,
) -> None:
    """Train an EAGLE-3 draft head for a target with training-time test (EAGLE-3, arXiv 2503.01840).

    Ends stdout with one JSON line: held-out loss, accuracy per step, simulated tau (tokens per step that serving the
    target's own held-out continuations would commit), tokens and seconds.
    """
    from aquiline.train.trainer import train as run

    config = TrainConfig(
        target=target, data=tuple(data), out=out, held_out=tuple(held_out or ()), context=context,
        draft_vocab_size=draft_vocab_size, intermediate_size=intermediate_size, num_heads=num_heads,
        num_kv_heads=num_kv_heads, capture=layers(capture), batch_size=batch_size, ttt_steps=ttt_steps,
        late_share=late_share, loss=loss, loss_on=loss_on, optimizer=optimizer, lr=lr, minutes=minutes, steps=steps,
        epochs=epochs, init=init, resume=resume, seed=seed, eval_every=eval_every,
    )  # fmt: skip
    typer.echo(json.dumps(run(config, quiet=json_only)))


train.__doc__ = f"{train.__doc__}\n{EXAMPLES}"


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

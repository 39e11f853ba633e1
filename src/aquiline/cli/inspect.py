"""`aquiline inspect`: what a draft or a target is, and what of a draft does not fit its target."""

from __future__ import annotations

import inspect as python_inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import AsJson
from aquiline.config import PairConfig

EXAMPLES = """
Examples:

  aquiline inspect ./draft --target ./target

  aquiline inspect smollm2 --target smollm2 --text book.txt

  aquiline inspect ./target --json
"""


@with_options
def inspect(
    checkpoint: Annotated[
        str, typer.Argument(help="Draft or target: directory, .gguf file, hub id or known pair.", metavar="CHECKPOINT")
    ],
    *,
    pair: Annotated[Given[PairConfig], Fields(only=("target", "capture", "norm_feedback"))],
    text: Annotated[
        Path | None,
        typer.Option(help="Text file: how much of it, and of the target's own choices in it, the draft can name."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what a draft or a target is from its config and the headers of its tensors; nothing is loaded without --text.

    With --target the checkpoint is read as a draft of that target: a known pair's name then stands for its draft.
    Exits with 1 if something does not fit, with 2 if the checkpoint cannot be read.
    """
    from aquiline.cli.show.inspection_tables import show_inspection
    from aquiline.models.draft_config import DraftOverrides
    from aquiline.models.inspection import inspect_checkpoint

    target = pair.get("target")
    if text is not None and target is None:
        raise ValueError("text: goes with --target, whose tokens and choices are counted")
    found = inspect_checkpoint(checkpoint, target, DraftOverrides(pair.get("capture"), pair.get("norm_feedback")))
    if text is not None and target is not None:
        from aquiline.engine.coverage import read_text, text_choices

        words = read_text(text)
        if found.draft_ids is not None:
            found.sections["coverage"] = dict(text_choices(PairConfig(target), words).coverage(found.draft_ids))
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show_inspection(found)
    if found.problems:
        raise typer.Exit(1)


inspect.__doc__ = f"{python_inspect.getdoc(inspect)}\n{EXAMPLES}"

"""`aquiline convert`: a draft in another producer's format."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import AsJson, tell
from aquiline.config import ConvertConfig, PairConfig

EXAMPLES = """
Examples:

  aquiline convert ./draft ./for-vllm --to speculators --target ./target

  aquiline convert ./draft draft.gguf --to gguf --target ./target --json
"""


@with_options
def convert(
    source: Annotated[Path, typer.Argument(help="Draft: directory, .gguf file or hub id.", metavar="SRC")],
    destination: Annotated[Path, typer.Argument(help="Folder, or .gguf file, to write.", metavar="DST")],
    *,
    config: ConvertConfig,
    pair: Annotated[Given[PairConfig], Fields(only=("target", "capture", "norm_feedback"))],
    as_json: AsJson = False,
) -> None:
    """Write a draft in another producer's format; its tensors keep their bytes.

    A field that the format cannot say is refused by name. --target is needed where the draft, or the format, does not
    name the layers that are captured. Converting back gives the same files: what only the first format has travels as
    `provenance` in the config.
    """
    from aquiline.models.conversion import convert as run
    from aquiline.models.draft_config import DraftOverrides

    overrides = DraftOverrides(pair.get("capture"), pair.get("norm_feedback"))
    done = run(source, destination, config, pair.get("target"), overrides)
    if as_json:
        print(json.dumps(asdict(done)))
        return
    for notice in done.notices:
        tell(notice)
    how = ", the same files as before" if done.is_restored else ""
    print(f"{source}: {done.source} ({done.declared}) -> {done.destination}: {done.path}{how}")


convert.__doc__ = f"{inspect.getdoc(convert)}\n{EXAMPLES}"

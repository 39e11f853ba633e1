"""`aquiline parity`: whether a pair computes what its models say, stage by stage; the exit code is the verdict."""

from __future__ import annotations

import inspect
import json

import typer

from aquiline.cli.fields import with_options
from aquiline.cli.options import AsJson, named, tell
from aquiline.config import PairConfig
from aquiline.parity.parity_choice import DUMP, ParityChoice

EXAMPLES = """
Examples:

  aquiline parity --target bundled

  aquiline parity --target bundled --dtype int4 --reference eager --stages draft --json

  aquiline parity --target ./target --draft ./draft --dtype float32 --stages layers logits

  aquiline parity --target bundled --reference eager --length 32 --dump ./stages

  aquiline parity --target bundled --reference dump:./their-stages --dtype float32
"""


@with_options
def parity(*, pair: PairConfig, choice: ParityChoice, as_json: AsJson = False) -> None:
    """Compare what a target and a draft compute with a reference, and name the first stage that differs and the cause.

    A prompt, decode steps and drafted trees are run as the engine serves them. Exits with 1 if a stage is outside its
    tolerance, which depends on how weights are stored and multiplied.
    """
    from aquiline.cli.show.parity_tables import as_dict, show_parity
    from aquiline.engine.model import ResolvedPair
    from aquiline.parity.run import compare_pair

    if choice.reference.startswith(DUMP) and choice.prompt is not None:
        tell(f"--prompt has no effect with --reference {choice.reference}")
    found = compare_pair(ResolvedPair.of(named(pair)), choice)
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        show_parity(found)
    if not found.is_good:
        raise typer.Exit(1)


parity.__doc__ = f"{inspect.getdoc(parity)}\n{EXAMPLES}"

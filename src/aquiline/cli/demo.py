"""`aquiline demo`: a chat model on its own prompts, the same text with and without speculation, and how fast."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson, named
from aquiline.config import EngineConfig, PairConfig
from aquiline.writing import check_place

EXAMPLES = """
Examples:

  aquiline demo

  aquiline demo --bundled

  aquiline demo --package networkx --json
"""


@with_options
def demo(
    bundled: Annotated[
        bool, typer.Option("--bundled", help="Run the small pair of Python source that comes with the package.")
    ] = False,
    package: Annotated[
        str | None,
        typer.Option(help="The bundled pair on prompts from this installed package (not one it was trained on)."),
    ] = None,
    *,
    pair: Annotated[PairConfig, Fields(only=("arithmetic",))],
    plot: Annotated[Path | None, typer.Option(help="Also write the result as a PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run SmolLM2-135M-Instruct on twelve chat prompts, plain and with its draft, greedy and sampled, and compare every
    token.

    Where its weights are not installed, the bundled pair runs on held-out code instead. Exits with 1 if speculation
    changed a token.
    """
    from aquiline.bench.suite.demo_run import demo_of, plot_demo
    from aquiline.cli.show.demo_tables import run_shown, show_demo
    from aquiline.engine.llm import LLM
    from aquiline.models.known_pairs import BUNDLED

    check_place(plot)
    pair = replace(pair, target=BUNDLED) if bundled or package is not None else named(pair)
    name = str(pair.target)
    llm = LLM.open(pair, EngineConfig(max_batch=1, prefix_cache=False))
    found = demo_of(name, llm.template(), package)
    result = run_shown(llm, found, is_shown=not as_json)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        show_demo(result, llm)
    if plot is not None:
        plot_demo(result, plot)
    if not result.identical:
        raise typer.Exit(1)


demo.__doc__ = f"{inspect.getdoc(demo)}\n{EXAMPLES}"

"""`aquiline demo`: the bundled pair, the same text with and without speculation, and how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson
from aquiline.config import EngineConfig, PairConfig


@with_options
def demo(
    package: Annotated[
        str | None, typer.Option(help="Take the prompts from this installed package (not one it was trained on).")
    ] = None,
    *,
    pair: Annotated[PairConfig, Fields(only=("arithmetic",))],
    plot: Annotated[Path | None, typer.Option(help="Also write the result as a PNG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run the bundled pair on held-out code: baseline, chain and tree, greedy and sampled, and compare every token.

    Exits with 1 if speculation changed a token.

    Examples:

      aquiline demo

      aquiline demo --package networkx --json
    """
    from aquiline.bench.data.prompts import package_prompts, read_prompts
    from aquiline.bench.suite.plot import plot_demo
    from aquiline.cli.show.demo import run_shown, show_demo
    from aquiline.engine.bundled import BUNDLED_PROMPTS
    from aquiline.engine.opened import open_llm

    llm = open_llm(pair, EngineConfig(max_batch=1, prefix_cache=False))
    assert llm.models.tokenizer is not None, "the bundled pair has a tokenizer"
    prompts = package_prompts(package, llm.models.tokenizer) if package else read_prompts(BUNDLED_PROMPTS)
    result = run_shown(llm, prompts, is_shown=not as_json)
    if plot is not None:
        plot_demo(result, plot)
    if as_json:
        print(json.dumps(result.as_dict()))
    else:
        show_demo(result, llm)
    if not result.identical:
        raise typer.Exit(1)

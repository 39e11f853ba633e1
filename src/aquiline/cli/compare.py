"""`aquiline compare`: other engines on the same weights and prompts, in one run, and who is faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from aquiline.bench.peers.contest import Contest
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson, named, wide_console
from aquiline.config import PairConfig
from aquiline.writing import check_place

if TYPE_CHECKING:
    from aquiline.bench.peers.verdict import Comparison


@with_options
def compare(
    *,
    contest: Contest,
    pair: Annotated[PairConfig, Fields(only=("target", "draft"))],
    out: Annotated[Path | None, typer.Option(help="Directory for one result JSON per setting.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run aquiline, with and without its draft, and its peers on the same prompts in turn, and say who is faster.

    Peers are optional: pip install 'aquiline\\[peers]'. Those that are not installed are named and left out. Options
    of a peer: float32, bfloat16, int8 (openvino, llamacpp) or int4 (llamacpp), beside which aquiline runs the same;
    llamacpp:packed for a .gguf target as it is, which aquiline then runs as it is too; lookup or lookup=K for the
    prompt lookup of openvino and transformers; ngram-simple, ngram-map-k, ngram-map-k4v, ngram-mod, each with =NxK to
    match N tokens and propose K, and ngram-cache for llama.cpp's; openvino:eagle and llamacpp:eagle draft with the
    EAGLE-3 head given here, at every length of --num-spec-tokens or at eagle=K. llamacpp:server and what drafts in
    llama.cpp run in its server, which benchmarks/llama_server.py builds. openvino:sdpa, openvino:samekv,
    transformers:eager and llamacpp:noflash run their attention another way; openvino:DIR/ takes a converted target.

    Examples:

      aquiline compare

      aquiline compare --peer openvino:bfloat16 openvino:bfloat16:lookup llamacpp:bfloat16 --repeats 5

      aquiline compare --target smollm2 --peer llamacpp:packed llamacpp:packed:eagle llamacpp:packed:ngram-cache

      aquiline compare --random-weights llama-230m --out results/

      aquiline compare --target ./target --draft ./draft --peer openai:http://localhost:8000/v1#NAME
    """
    from aquiline.bench.peers import comparison

    check_place(out, is_folder=True)
    plan = comparison.plan_of(contest, pair if contest.random_weights is not None else named(pair))
    with Console(stderr=True, quiet=as_json).status("") as status:
        found = comparison.compare(plan, status.update)
    _show(found, plan.title, contest.new_tokens, as_json)
    if out is not None:  # last: a disk that is full must not cost the figures
        found.write(out)


def _show(found: Comparison, title: str, new_tokens: int, as_json: bool) -> None:
    """Print every setting beside the baseline, the reasons of void ones, and who is faster; or all of it as JSON."""
    from aquiline.bench.results.result import is_dirty

    if as_json:
        print(json.dumps(found.as_dict()))
        return
    console = wide_console()
    console.print(found.table(title, new_tokens).console())
    for line in found.notes():
        console.print(line, markup=False, soft_wrap=True)
    if is_dirty(found.results[0]):
        console.print("uncommitted changes: nobody can measure this again; not to be published", style="bold")
    for line in found.verdict:
        console.print(line, style="bold", soft_wrap=True)

"""`aquiline profile`: where a step's time goes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson, chosen, named
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.spec.registry import DraftingChoice
from aquiline.writing import check_place

EXAMPLES = """
Examples:

  aquiline profile --trace trace.json

  aquiline profile --drafter none --context 2048

  aquiline profile --drafter dynamic --depth 5 --draft-top-k 10 --num-nodes 60
"""


@with_options
def profile(
    *,
    pair: Annotated[PairConfig, Fields(only=("target", "draft", "dtype", "draft_dtype", "arithmetic", "kv_dtype"))],
    choice: DraftingChoice,
    context: Annotated[int, typer.Option(help="Prompt tokens, of real text.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens each of them writes.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (chrome://tracing, Perfetto).")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the stages of decode steps: draft, verify, keep, host, with their share of the cycle."""
    from aquiline.bench.data.prompts import text_prompts
    from aquiline.bench.suite.stages import profile as run_profile
    from aquiline.cli.show.stage_table import show_profile
    from aquiline.engine.llm import LLM

    check_place(trace)
    pair = named(pair)
    drafting = chosen(choice, pair)
    config = EngineConfig(max_batch=batch, max_context=context + new_tokens, prefix_cache=False)
    llm = LLM.open(pair, config)
    if llm.models.tokenizer is None:
        raise ValueError(f"target={pair.target!r}: has no tokenizer.json, and prompts are text")
    prompts = [p.token_ids for p in text_prompts(context, batch, llm.models.tokenizer)]
    sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=0, ignore_eos=True)
    found = run_profile(llm, drafting, prompts, sampling)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show_profile(found, f"{batch} sequences, {context} prompt tokens")
    if trace is not None:
        found.write_trace(trace)


profile.__doc__ = f"{inspect.getdoc(profile)}\n{EXAMPLES}"

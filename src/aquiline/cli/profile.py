"""`aquiline profile`: where a step's time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.bench.suite.suite_plan import RandomWeights
from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import AsJson, chosen, named
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.spec.registry import DraftingChoice
from aquiline.writing import check_place


@with_options
def profile(
    *,
    pair: Annotated[PairConfig, Fields(only=("target", "draft", "dtype", "draft_dtype", "arithmetic"))],
    choice: DraftingChoice,
    context: Annotated[int, typer.Option(help="Prompt tokens, of real text.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens each of them writes.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (chrome://tracing, Perfetto).")] = None,
    as_json: AsJson = False,
) -> None:
    """Time the stages of decode steps: draft, verify, keep, host, with their share of the cycle.

    Examples:

      aquiline profile --trace trace.json

      aquiline profile --drafter none --context 2048

      aquiline profile --drafter dynamic --depth 5 --draft-top-k 10 --num-nodes 60
    """
    from aquiline.bench.data.prompts import text_prompts
    from aquiline.bench.suite.scenarios import sources_of
    from aquiline.bench.suite.stages import profile as run_profile
    from aquiline.cli.show.stage_table import show_profile

    check_place(trace)
    pair = named(pair)
    drafting = chosen(choice, pair)
    config = EngineConfig(max_batch=batch, max_context=context + new_tokens, prefix_cache=False)
    models = sources_of(pair, RandomWeights())[0].load()
    if models.tokenizer is None:
        raise ValueError(f"target={pair.target!r}: has no tokenizer.json, and prompts are text")
    prompts = [p.token_ids for p in text_prompts(context, batch, models.tokenizer)]
    sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=0, ignore_eos=True)
    found = run_profile(models, config, drafting, prompts, sampling)
    if as_json:
        print(json.dumps(found.as_dict()))
    else:
        show_profile(found, f"{batch} sequences, {context} prompt tokens")
    if trace is not None:
        found.write_trace(trace)

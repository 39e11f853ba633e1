"""`aquiline profile`: where a step's time goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.options import Arithmetic, Dtype, wide_console
from aquiline.spec.drafting import drafting


def profile(
    target: Annotated[str | None, typer.Option(help="Target checkpoint. Default: bundled.")] = None,
    draft: Annotated[str | None, typer.Option(help="EAGLE-3 draft checkpoint.")] = None,
    drafter: Annotated[str, typer.Option(help="none, chain, static or dynamic.")] = "chain",
    num_spec_tokens: Annotated[int, typer.Option(help="Chain length.")] = 3,
    depth: Annotated[int, typer.Option(help="Dynamic: passes past the first.")] = 2,
    draft_top_k: Annotated[int, typer.Option(help="Dynamic: beam width.")] = 2,
    num_nodes: Annotated[int, typer.Option(help="Dynamic: nodes, root too.")] = 6,
    context: Annotated[int, typer.Option(help="Prompt tokens, of real text.")] = 256,
    batch: Annotated[int, typer.Option(help="Sequences that decode together.")] = 1,
    new_tokens: Annotated[int, typer.Option(help="Tokens each of them writes.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    dtype: Dtype = "bfloat16",
    arithmetic: Arithmetic = "auto",
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace (chrome://tracing, Perfetto).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time the stages of decode steps: draft, masks, verify, accept, commit, host, with their share of the cycle.

    Examples:

      aquiline profile --trace trace.json

      aquiline profile --drafter none --context 2048

      aquiline profile --drafter dynamic --depth 5 --draft-top-k 10 --num-nodes 60
    """
    from rich.table import Table

    from aquiline.bench.data.prompts import text_prompts
    from aquiline.bench.suite.profile import profile as run_profile
    from aquiline.bench.suite.scenarios import Source
    from aquiline.config import EngineConfig, SamplingParams

    spec = drafting(drafter, num_spec_tokens=num_spec_tokens, depth=depth, top_k=draft_top_k, num_nodes=num_nodes)
    config = EngineConfig(max_batch=batch, max_context=context + new_tokens, prefix_cache=False)
    models = Source(target, draft, dtype, arithmetic).load()
    if models.tokenizer is None:
        raise ValueError(f"target={target!r}: has no tokenizer.json, and prompts are text")
    prompts = [p.token_ids for p in text_prompts(context, batch, models.tokenizer)]
    sampling = SamplingParams(max_tokens=new_tokens, temperature=temperature, seed=0, ignore_eos=True)
    found = run_profile(models, config, spec, prompts, sampling)
    if trace is not None:
        found.write_trace(trace)
    if as_json:
        print(json.dumps(found.as_dict()))
        return
    s = found.summary
    table = Table(
        title=f"{s.num_decode_steps} steps, {batch} sequences, {context} prompt tokens, tau {s.counters.tau:.2f}"
    )
    for column in ("range", "calls", "ms per step", "% of cycle"):
        table.add_column(column, justify="left" if column == "range" else "right")
    for row in found.rows:
        name = f"  {row.name}" if row.is_part else row.name
        table.add_row(name, str(row.calls), f"{row.ms_per_step:.3f}", f"{100 * row.share:.1f}")
    wide_console().print(table)

"""`aquiline regenerate`: a target's own answers to a file of prompts, for training a draft."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from aquiline.cli.options import Arithmetic, Capture, Dtype, NormFeedback, TemplateOptions, template_options_of
from aquiline.cli.train import layers

ROWS, SAMPLING, ENGINE = "Which rows", "How answers are drawn", "Batch and memory"

EXAMPLES = """
Examples:

  aquiline regenerate --target ./target --data prompts.jsonl --out answers.jsonl

  aquiline regenerate --target ./target --data chats.jsonl more.jsonl.gz --out answers.jsonl --max-batch 32 --limit 5000

  aquiline regenerate --target ./target --data chats.jsonl --out greedy.jsonl --temperatures 0

  aquiline regenerate --target ./target --data chats.jsonl --out second.jsonl --skip-ids answers.jsonl --json

The same command continues a run that was stopped; a row of OUT is {"id", "source", "category", "license",
"temperature", "seed", "finish_reasons", "messages", "token_ids", "loss_mask"}, id the row of the prompts from 0. With
--draft it also has "rejected": per token id 1 where the draft's guess was another.
"""


def regenerate(
    target: Annotated[str, typer.Option(help="Target checkpoint: directory, .gguf file or hub id.")],
    data: Annotated[
        list[Path],
        typer.Option(
            help="Prompts: .jsonl, .jsonl.gz or a JSON list of rows with messages, conversations (ShareGPT), turns or "
            "prompt. Every user turn is answered before the next; answers in the rows are dropped. Repeatable."
        ),
    ],
    out: Annotated[Path, typer.Option(help="JSONL to write or to continue, a row per finished conversation.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="EAGLE-3 draft checkpoint, to speculate with. The answers are the same; rows also say which tokens "
            "the draft missed, for train --replay."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Rows to answer at most.", rich_help_panel=ROWS)] = None,
    start: Annotated[int, typer.Option(help="Rows of the order to leave out first.", rich_help_panel=ROWS)] = 0,
    skip_ids: Annotated[
        list[Path] | None,
        typer.Option(help="Earlier outputs whose ids are left out; repeatable.", rich_help_panel=ROWS),
    ] = None,
    shuffle_seed: Annotated[
        int, typer.Option(help="Order of the rows, so that part of a run is a fair sample.", rich_help_panel=ROWS)
    ] = 0,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Take the rows as they stand instead.", rich_help_panel=ROWS)
    ] = False,
    temperatures: Annotated[
        list[float] | None, typer.Option(help="A row is drawn at one. Default: 0 0.8 1.0.", rich_help_panel=SAMPLING)
    ] = None,
    temperature_weights: Annotated[
        list[float] | None,
        typer.Option(
            help="Share of each. Default: 0.4 0.4 0.2; the same for all of other temperatures.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens of an answer at most.", rich_help_panel=SAMPLING)] = 512,
    seed: Annotated[
        int, typer.Option(help="With a row's number it gives temperature and noise.", rich_help_panel=SAMPLING)
    ] = 0,
    max_batch: Annotated[int, typer.Option(help="Conversations that run at once.", rich_help_panel=ENGINE)] = 16,
    max_context: Annotated[
        int | None,
        typer.Option(help="Tokens of a conversation at most. Default: the model's.", rich_help_panel=ENGINE),
    ] = None,
    cache_fraction: Annotated[
        float, typer.Option(help="Share of the free memory that keys and values may take.", rich_help_panel=ENGINE)
    ] = 0.5,
    template_options: TemplateOptions = None,
    capture: Capture = None,
    norm_feedback: NormFeedback = None,
    dtype: Dtype = "bfloat16",
    arithmetic: Arithmetic = "auto",
    json_only: Annotated[bool, typer.Option("--json", help="Nothing but the JSON result on stdout.")] = False,
) -> None:
    """Answer prompts with the target itself, many at once: what a draft for it should train on.

    An answer depends on --seed, its row and the sampling options alone, not on batch, order, draft or interruptions.
    Every row is done, failed or skipped, with its reason on stderr. Ends stdout with one JSON line: counts, tokens,
    tokens per second, answers by temperature.
    """
    from aquiline.config import EngineConfig
    from aquiline.engine.llm import LLM
    from aquiline.models.load import resolve
    from aquiline.text.chat import ChatTemplate
    from aquiline.train.regenerate import DEFAULT_TEMPERATURES, DEFAULT_WEIGHTS, RegenerateConfig, Regeneration

    weights = temperature_weights or ([1.0] * len(temperatures) if temperatures else DEFAULT_WEIGHTS)
    config = RegenerateConfig(
        data=tuple(data), out=out, temperatures=tuple(temperatures or DEFAULT_TEMPERATURES),
        temperature_weights=tuple(weights), max_tokens=max_tokens, seed=seed,
        shuffle_seed=None if in_order else shuffle_seed, skip_ids=tuple(skip_ids or ()), start=start, limit=limit,
    )  # fmt: skip
    options = template_options_of(template_options)
    # Prompts share no more than a short system message: small pages hold it, pages of 64 tokens would not.
    engine = EngineConfig(max_batch=max_batch, max_context=max_context, page_size=16, cache_fraction=cache_fraction)
    llm = LLM(
        target, draft, dtype=dtype, arithmetic=arithmetic, engine=engine, capture=layers(capture),
        norm_feedback=norm_feedback,
    )  # fmt: skip
    checkpoint = resolve(target)
    template = ChatTemplate.load(checkpoint, llm.models.tokenizer, options)
    run = Regeneration(llm, template, checkpoint, config, is_shown=True)
    print(llm.engine.memory, file=sys.stderr)
    result = run.run()
    if not json_only:
        print(result)
    print(json.dumps(result.as_dict() | {"memory": llm.engine.memory.as_dict(), "system": llm.models.system()}))


regenerate.__doc__ = f"{inspect.getdoc(regenerate)}\n{EXAMPLES}"

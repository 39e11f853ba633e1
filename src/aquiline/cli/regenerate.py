"""`aquiline regenerate`: a target's own answers to a file of prompts, for training a draft."""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import tell
from aquiline.config import ChatConfig, EngineConfig, PairConfig
from aquiline.regenerate.regenerate_config import ROWS, RegenerateConfig

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object: counts, tokens, tokens per second, by temperature.")
]
SIZES = Fields(only=("max_batch", "max_context", "cache_fraction"), defaults={"max_batch": 16})

if TYPE_CHECKING:
    from aquiline.regenerate.regeneration import Regeneration

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


@with_options
def regenerate(
    target: Annotated[str, typer.Option(help="Target checkpoint: directory, .gguf file or hub id.")],
    *,
    settings: Given[RegenerateConfig],
    draft: Annotated[
        str | None,
        typer.Option(
            help="EAGLE-3 draft checkpoint, to speculate with. The answers are the same; rows also say which tokens "
            "the draft missed, for train --replay."
        ),
    ] = None,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Take the rows as they stand instead.", rich_help_panel=ROWS)
    ] = False,
    engine: Annotated[EngineConfig, SIZES],
    template: Annotated[ChatConfig, Fields(only=("template_options",))],
    pair: Annotated[PairConfig, Fields(without=("target", "draft"))],
    as_json: Json = False,
) -> None:
    """Answer prompts with the target itself, many at once: what a draft for it should train on.

    An answer depends on --seed, its row and the sampling options alone, not on batch, order, draft or interruptions.
    Every row is done, failed or skipped, with its reason on stderr; the summary stands there too. Exits with 1 if a row
    failed.
    """
    from aquiline.engine.llm import LLM
    from aquiline.models.load import resolve
    from aquiline.regenerate.answer_file import check_settings
    from aquiline.regenerate.regenerate_config import regenerate_config
    from aquiline.regenerate.regeneration import Regeneration, asked_settings
    from aquiline.spec.drafting import Chain

    config = regenerate_config(settings, in_order=in_order)
    asked = asked_settings(config, resolve(target), template.template_options)
    check_settings(config.out, asked)
    # Prompts share no more than a short system message: small pages hold it, pages of 64 tokens would not.
    named, sizes = replace(pair, target=target, draft=draft), replace(engine, page_size=16)
    llm = LLM.open(named, sizes, None if draft is None else Chain())
    wrapped = llm.template(template.template_options)
    tell(wrapped.notice)
    _finish(Regeneration(llm, wrapped, config, asked, is_shown=True), as_json)


def _finish(run: Regeneration, as_json: bool) -> None:
    """Answer the rows and print the summary."""
    memory = run.llm.engine.memory
    print(memory, file=sys.stderr)
    result = run.run()
    print(result, file=sys.stderr)
    if as_json:
        print(json.dumps(result.as_dict() | {"memory": memory.as_dict(), "system": run.llm.models.system()}))
    if result.num_failed:
        raise typer.Exit(1)


regenerate.__doc__ = f"{inspect.getdoc(regenerate)}\n{EXAMPLES}"

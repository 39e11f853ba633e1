"""`aquiline serve`: the model behind OpenAI's HTTP interface."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, with_options
from aquiline.cli.options import chosen, named
from aquiline.config import BATCH, ChatConfig, EngineConfig, PairConfig
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.serve.server_config import Limits, ServerConfig
from aquiline.spec.registry import DraftingChoice

ENGINE = ("page_size", "num_pages", "cache_fraction", "prefix_cache", "shared_lookup_bytes", "calibration", "check")

EXAMPLES = """
Examples:

  aquiline serve

  aquiline serve --target model.gguf --draft ./draft --served-model-name smollm2 --max-num-seqs 16

  aquiline serve --target ./target --host 0.0.0.0 --api-key KEY --per-request-spec-decode-metrics summary

  curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' -d '{"messages": [{"role": "user",
  "content": "Hello"}], "stream": true}'
"""


@with_options
def serve(
    *,
    server: ServerConfig,
    pair: PairConfig,
    choice: DraftingChoice,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.", rich_help_panel=BATCH)] = 16,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence, prompt and output. Default: what the model was built for.",
            rich_help_panel=BATCH,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Rows of one forward: decoding first, then chunks of prompts, the last of which may have an eighth "
            "more.",
            rich_help_panel=BATCH,
        ),
    ] = 256,
    engine: Annotated[EngineConfig, Fields(only=ENGINE)],
    limits: Limits,
    learning: LearnConfig,
    template: Annotated[ChatConfig, Fields(only=("template_options",))],
) -> None:
    """Serve a target, with or without a draft, behind OpenAI's HTTP interface: the text is the same either way.

    /v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /tokenize, /detokenize, /health, /ready,
    /version, /metrics, and a page to chat at /. The first SIGTERM or Ctrl-C drains, the second one ends.
    """
    from dataclasses import replace

    from aquiline.config import Environment

    try:
        from aquiline.serve.server import open_service, with_environment
        from aquiline.serve.server import serve as run
    except ModuleNotFoundError as error:
        raise ValueError(f"serve: {error.name} is not installed; pip install 'aquiline[serve]'") from None

    pair = named(pair)
    drafting = chosen(choice, pair)
    sizes = replace(engine, max_batch=max_num_seqs, max_context=max_model_len, row_budget=max_num_batched_tokens)
    config = with_environment(server, Environment.read())
    run(open_service(pair, sizes, drafting, config, limits, template, learning))


serve.__doc__ = f"{inspect.getdoc(serve)}\n{EXAMPLES}"

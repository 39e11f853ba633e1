"""`aquiline chat`: talk to a model in the terminal, or through a pipe."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from typing import Annotated

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import chosen, following, named, tell
from aquiline.config import ChatConfig, EngineConfig, PairConfig, SamplingParams, Structured
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.spec.registry import DraftingChoice

OFFERED = Fields(only=("max_tokens", "temperature", "top_k", "top_p", "seed"), defaults={"max_tokens": 1024})

EXAMPLES = """
Examples:

  aquiline chat --target smollm2

  aquiline chat --target ./target --draft ./draft

  aquiline chat --target ./target --system 'Answer in one sentence.' --temperature 0.8 --seed 1

  printf 'Name a fruit.\\nAnother one.\\n' | aquiline chat --target ./target --json

Commands: /reset, /system TEXT (without TEXT: none), /exit. Ctrl-C stops the current answer.
"""


@with_options
def chat(
    *,
    template: ChatConfig,
    pair: PairConfig,
    sampling: Annotated[SamplingParams, OFFERED],
    structured: Given[Structured],
    choice: DraftingChoice,
    learn: LearnConfig,
    engine: Annotated[EngineConfig, Fields(only=("max_context",))],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
) -> None:
    """Talk to a model: answers stream as they are written, tokens of the draft in colour, figures after each answer.

    The target's chat template turns the conversation into its prompt. Without a terminal each line of stdin is a turn.
    Reasoning in Harmony's channel for it is dimmed in a terminal, left out of pipes, and "reasoning" with --json.
    """
    from aquiline.cli.show.conversation import converse
    from aquiline.engine.chat_session import ChatSession
    from aquiline.engine.learning.learning_loop import learning
    from aquiline.engine.llm import LLM

    if sys.stdin is None:
        raise ValueError("chat: stdin is closed; talk in a terminal, or write a turn a line to stdin")
    sampling = following(sampling, structured)
    pair = named(pair)
    drafting = chosen(choice, pair)
    llm = LLM.open(pair, replace(engine, max_batch=1), drafting)
    wrapped = llm.template(template.template_options)
    session = ChatSession(llm, wrapped, sampling, template.system)
    tell(wrapped.notice)
    with learning(llm, pair, learn) as learner:
        tell(None if learner is None else learner.notice)
        converse(session, drafting.is_speculative, as_json)
        tell(None if learner is None else learner.summary)


chat.__doc__ = f"{inspect.getdoc(chat)}\n{EXAMPLES}"

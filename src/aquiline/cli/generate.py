"""`aquiline generate`: one prompt and its continuation, or a file of them."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.fields import Fields, Given, with_options
from aquiline.cli.options import AsJson, chosen, following, named, tell
from aquiline.config import ChatConfig, EngineConfig, PairConfig, SamplingParams, Structured
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.spec.registry import DraftingChoice

if TYPE_CHECKING:
    from aquiline.engine.llm import LLM
    from aquiline.spec.drafting import Drafting
    from aquiline.text.chat_template import ChatTemplate

BULK_HEADING = "Many prompts"

EXAMPLES = """
Examples:

  aquiline generate --prompt 'def fibonacci(n):' --max-tokens 64

  aquiline generate --target ./target --draft ./draft --prompt-file prompt.txt --temperature 0.8 --seed 1 --json

  aquiline generate --target smollm2 --chat --prompt 'Why is the sky blue?'

  aquiline generate --target ./target --chat --system 'Be brief.' --prompt 'Why is the sky blue?'

  aquiline generate --prompts-file questions.jsonl --out answers.jsonl --max-batch 16 --max-tokens 256

  aquiline generate --drafter lookup --prompt-file task.txt --prediction @draft.py --max-tokens 512

  aquiline generate --target smollm2 --chat --prompt 'Name a city.' --json-schema city.schema.json

  echo 'import os' | aquiline generate --drafter dynamic --depth 4 --draft-top-k 4 --num-nodes 16
"""


Prompt = Annotated[str | None, typer.Option(help="Prompt text. Default: --prompt-file, else stdin.")]
PromptFile = Annotated[Path | None, typer.Option(help="File whose whole text is the prompt.")]
Prediction = Annotated[
    str | None, typer.Option(help="Text that is expected to come back, or @FILE; --drafter lookup copies from it.")
]
AsChat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="The prompt is a user's message: wrap it in the target's chat template. Of Harmony's channels the final "
        'one is printed; with --json, and in files, the others are "reasoning".',
    ),
]
PromptsFile = Annotated[
    Path | None, typer.Option(help='JSONL of {"prompt": text}; resumes where --out ends.', rich_help_panel=BULK_HEADING)
]
OutFile = Annotated[
    Path | None,
    typer.Option(help="JSONL of results for --prompts-file, in its order.", rich_help_panel=BULK_HEADING),
]
ENGINE = Fields(only=("max_batch", "max_context", "cache_fraction", "shared_lookup_bytes"))


@with_options
def generate(
    prompt: Prompt = None, prompt_file: PromptFile = None, prediction: Prediction = None, chat: AsChat = False,
    *, template: ChatConfig, pair: PairConfig, sampling: SamplingParams,
    structured: Given[Structured], choice: DraftingChoice,
    prompts_file: PromptsFile = None, out: OutFile = None, learn: LearnConfig,
    engine: Annotated[Given[EngineConfig], ENGINE], as_json: AsJson = False,
) -> None:  # fmt: skip
    """Continue a prompt, or each of a file, with a target, with or without a draft; the text is the same either way.

    Exits with 1 if a row of a file failed.
    """
    from aquiline.cli.show.continuations import show_continuation, show_file
    from aquiline.engine.bulk import BulkRun
    from aquiline.engine.chat_session import user_prompt
    from aquiline.engine.encode import ending_with
    from aquiline.engine.learning.learning_loop import learning
    from aquiline.engine.llm import LLM
    from aquiline.engine.model import ResolvedPair

    sampling = following(sampling, structured)
    pair = named(pair)
    drafting = chosen(choice, pair)
    _check_together(chat, template, prediction, prompts_file, out, drafting)
    if prompts_file is not None and out is not None:
        resolved = ResolvedPair.of(pair, drafting)
        settings = resolved.identity(drafting) | (
            {"chat": [template.system, template.template_options]} if chat else {}
        )
        run = BulkRun(prompts_file, out, sampling, settings)
        llm = LLM.from_models(resolved.load(), EngineConfig(**engine), drafting)
        wrapped = _template_of(llm, chat, template)
        with learning(llm, pair, learn) as learner:
            tell(None if learner is None else learner.notice)
            failed = show_file(run, llm, wrapped, template.system, as_json).failed
            tell(None if learner is None else learner.summary)
        if failed:
            raise typer.Exit(1)
        return
    text, expected = _prompt_text(prompt, prompt_file), None if prediction is None else _text_of(prediction)
    one_at_once: Given[EngineConfig] = Given({"max_batch": 1} | engine)
    llm = LLM.open(pair, EngineConfig(**one_at_once), drafting)
    wrapped = _template_of(llm, chat, template)
    ids = llm.encode(text) if wrapped is None else user_prompt(wrapped, text, template.system)
    sampling = sampling if wrapped is None else ending_with(wrapped, sampling)
    with learning(llm, pair, learn) as learner:
        tell(None if learner is None else learner.notice)
        show_continuation(llm, text, ids, sampling, expected, as_json, wrapped)


generate.__doc__ = f"{inspect.getdoc(generate)}\n{EXAMPLES}"


def _check_together(
    chat: bool, template: ChatConfig, prediction: str | None, prompts_file: Path | None, out: Path | None,
    drafting: Drafting,
) -> None:  # fmt: skip
    """Raises ValueError for options that do not go together; says on stderr which one has no effect."""
    if (prompts_file is None) != (out is None):
        raise ValueError("prompts_file: --prompts-file and --out go together")
    if not chat and template != ChatConfig():
        raise ValueError("system, template_options: go with --chat")
    if prediction is not None and prompts_file is not None:
        raise ValueError('prediction: goes with one prompt; give rows of --prompts-file a "prediction" of their own')
    if prediction is not None and not drafting.reads_prediction:
        tell(f"--prediction has no effect with drafter {drafting.name}")


def _template_of(llm: LLM, chat: bool, template: ChatConfig) -> ChatTemplate | None:
    """The chat template of the target, if the prompt is a user's message."""
    wrapped = llm.template(template.template_options) if chat else None
    tell(None if wrapped is None else wrapped.notice)
    return wrapped


def _text_of(given: str) -> str:
    """A text from the command line, or from the file that @FILE names."""
    return Path(given[1:]).read_text(encoding="utf-8") if given.startswith("@") else given


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise ValueError(f"prompt_file={str(prompt_file)!r}: give --prompt or --prompt-file, not both")
    if prompt is None and prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("prompt: give --prompt, --prompt-file or text on stdin")
    if prompt is not None:
        text, where = prompt, "prompt=''"
    elif prompt_file is not None:
        text, where = prompt_file.read_text(encoding="utf-8"), f"prompt_file={str(prompt_file)!r}"
    else:
        text, where = sys.stdin.read(), "prompt: stdin"
    if not text:
        raise ValueError(f"{where}: is empty; give at least one character with --prompt, --prompt-file or on stdin")
    return text

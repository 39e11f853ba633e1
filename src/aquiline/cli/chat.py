"""`aquiline chat`: talk to a model in the terminal, or through a pipe. The conversation itself is engine/chat.py's."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from aquiline.cli.generate import described
from aquiline.cli.options import (
    Arithmetic,
    Capture,
    Depth,
    Draft,
    Drafter,
    DraftTopK,
    Dtype,
    MaxTokens,
    NormFeedback,
    NumNodes,
    NumSpecTokens,
    Seed,
    System,
    Target,
    Temperature,
    TemplateOptions,
    TopK,
    TopP,
    chosen_spec,
    default_drafter,
    load_template,
    template_options_of,
)
from aquiline.cli.train import layers
from aquiline.errors import AquilineError

if TYPE_CHECKING:
    from rich.console import Console

    from aquiline.engine.chat import Answer, ChatSession, Piece

PROMPT = "> "
BY_DRAFT = "green"
COMMANDS = "/reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D ends"

EXAMPLES = """
Examples:

  aquiline chat --target DIR --draft DIR

  aquiline chat --target DIR --system 'Answer in one sentence.' --temperature 0.8 --seed 1

  printf 'Name a fruit.\\nAnother one.\\n' | aquiline chat --target DIR --json

Commands: /reset, /system TEXT (without TEXT: none), /exit. Ctrl-C stops the current answer.
"""


def chat(
    target: Target = None,
    draft: Draft = None,
    system: System = None,
    template_options: TemplateOptions = None,
    max_tokens: MaxTokens = 1024,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    drafter: Drafter = None,
    num_spec_tokens: NumSpecTokens = None,
    depth: Depth = None,
    draft_top_k: DraftTopK = None,
    num_nodes: NumNodes = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of the whole conversation.")] = None,
    capture: Capture = None,
    norm_feedback: NormFeedback = None,
    dtype: Dtype = "bfloat16",
    arithmetic: Arithmetic = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object an answer.")] = False,
) -> None:
    """Talk to a model: answers stream as they are written, tokens of the draft in colour, figures behind each answer.

    The target's chat template turns the conversation into its prompt. Without a terminal each line of stdin is a turn.
    """
    from aquiline.config import EngineConfig, SamplingParams
    from aquiline.engine.chat import ChatSession
    from aquiline.engine.llm import LLM

    sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    kind = drafter or default_drafter(target, draft)
    spec = chosen_spec(kind, num_spec_tokens=num_spec_tokens, depth=depth, top_k=draft_top_k, num_nodes=num_nodes)
    options = template_options_of(template_options)
    llm = LLM(
        target, None if kind == "none" else draft, spec=spec, dtype=dtype, arithmetic=arithmetic,
        engine=EngineConfig(max_batch=1, max_context=max_context), capture=layers(capture),
        norm_feedback=norm_feedback,
    )  # fmt: skip
    template = load_template(target, llm, options)
    session = ChatSession(llm, template, sampling, system)
    if not template.has_template:
        name = target or "the bundled target"
        print(f"aquiline: {name} has no chat template: what you write is continued as plain text", file=sys.stderr)
    if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        _converse(session, spec.is_speculative)
    else:
        _answer_lines(session, as_json)


chat.__doc__ = (chat.__doc__ or "") + EXAMPLES


def _converse(session: ChatSession, drafts: bool) -> None:
    """A conversation in a terminal, until /exit or Ctrl-D. What cannot be answered is said, and the next turn read."""
    from rich.console import Console

    with suppress(ImportError):  # where it is there, it gives input() line editing and history
        import readline  # noqa: F401

    console = Console(highlight=False, markup=False, emoji=False)
    if drafts:
        console.print("Tokens that the draft wrote are ", end="")
        console.print(f"{BY_DRAFT}; the target checked each of them.", style=BY_DRAFT)
    console.print(f"{COMMANDS}; Ctrl-C stops an answer.", style="dim", soft_wrap=True)
    for line in _turns(_typed()):
        said = _command(session, line)
        if said is not None:
            console.print(said, style="dim")
            continue
        try:
            _show(session, line, console)
        except (ValueError, AquilineError) as error:
            console.print(str(error), style="red", soft_wrap=True)


def _show(session: ChatSession, line: str, console: Console) -> None:
    def show(piece: Piece) -> None:
        console.print(piece.text, style=BY_DRAFT if piece.by_draft else None, end="", soft_wrap=True)

    with _interruptible() as pressed:
        answer = session.ask(line, show, lambda: pressed.is_set)
    console.print(f"\n{answer.footer}\n", style="dim")


def _answer_lines(session: ChatSession, as_json: bool) -> None:
    """Each line of stdin is a turn; answers go to stdout, all else to stderr. What cannot be answered ends it."""
    for line in _turns(sys.stdin):
        said = _command(session, line)
        if said is not None:
            print(f"aquiline: {said}", file=sys.stderr)
        elif as_json:
            print(json.dumps(_as_dict(session.ask(line))), flush=True)
        else:
            answer = session.ask(line, lambda piece: print(piece.text, end="", flush=True))
            print(flush=True)
            print(answer.footer, file=sys.stderr)


def _as_dict(answer: Answer) -> dict[str, object]:
    figures = {"share_by_draft": answer.share_by_draft, "metrics": answer.summary.as_dict()}
    return described(answer.output) | figures


def _turns(lines: Iterable[str]) -> Iterator[str]:
    """Lines that say something, until one is /exit."""
    for line in lines:
        if line.strip() == "/exit":
            return
        if line.strip():
            yield line.strip()


def _typed() -> Iterator[str]:
    """Lines of the terminal until Ctrl-D; Ctrl-C drops the line."""
    while True:
        try:
            yield input(PROMPT)
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


def _command(session: ChatSession, line: str) -> str | None:
    """Carry out a line that is a command and say what was done; None if it is none."""
    found = re.match(r"/([a-z]+)(?:\s+(.*))?$", line, re.DOTALL)
    if found is None:
        return None
    name, text = found.groups()
    if name == "reset":
        session.reset()
        return "the conversation begins anew"
    if name == "system":
        session.system = text
        return "there is no system message" if text is None else "the system message is set"
    return f"/{name} is no command: {COMMANDS}"


@dataclass(eq=False)
class _Pressed:
    """Whether Ctrl-C was pressed."""

    is_set: bool = False


@contextmanager
def _interruptible() -> Iterator[_Pressed]:
    """Inside, Ctrl-C is noted and interrupts nothing: a step of the engine must not be torn in two."""
    pressed = _Pressed()

    def note(number: int, frame: FrameType | None) -> None:
        pressed.is_set = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)

"""A conversation in the terminal, or through a pipe. engine/chat_session.py runs the conversation itself."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

from rich.console import Console

from aquiline.cli.show.continuations import described, tell_unread
from aquiline.cli.show.writers import COLOURS, has_colours, legend
from aquiline.engine.chat_session import Answer, AttributedText, ChatSession
from aquiline.errors import AquilineError
from aquiline.text.parsers import Channel

PROMPT = "> "
COMMAND_HELP = "/reset forgets the conversation, /system TEXT sets the system message, /exit or Ctrl-D ends"


def converse(session: ChatSession, drafts: bool, as_json: bool) -> None:
    """Answer the user of a terminal, or each line of stdin."""
    if sys.stdin.isatty() and sys.stdout.isatty() and not as_json:
        _talk(session, drafts)
    else:
        _answer_lines(session, as_json)


def _talk(session: ChatSession, drafts: bool) -> None:
    """A conversation in a terminal, until /exit or Ctrl-D. A turn that cannot be answered prints its error."""
    with suppress(ImportError):  # where it is there, it gives input() line editing and history
        import readline  # noqa: F401

    console = Console(highlight=False, markup=False, emoji=False)
    if drafts and has_colours(console):
        console.print(legend(console), soft_wrap=True)
    console.print(f"{COMMAND_HELP}; Ctrl-C stops an answer.", style="dim", soft_wrap=True)
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
    """One turn: the reasoning dimmed, an empty line, the answer, the figures."""
    last: Channel | None = None

    def show(piece: AttributedText) -> None:
        nonlocal last
        if last not in (None, piece.channel):
            console.print("\n")
        last = piece.channel
        style = "dim" if piece.channel == "reasoning" else COLOURS[piece.source]
        console.print(piece.text, style=style, end="", soft_wrap=True)

    with _interruptible() as pressed:
        answer = session.ask(line, show, lambda: pressed.is_set)
    console.print(f"\n{answer.footer}\n", style="dim")
    tell_unread(answer.problem)


def _answer_lines(session: ChatSession, as_json: bool) -> None:
    """Each line of stdin is a turn. Answers go to stdout, all else to stderr. The first error ends the conversation."""
    for line in _turns(sys.stdin):
        said = _command(session, line)
        if said is not None:
            print(f"aquiline: {said}", file=sys.stderr)
        elif as_json:
            answer = session.ask(line)
            tell_unread(answer.problem)
            print(json.dumps(_as_dict(answer)), flush=True)
        else:
            answer = session.ask(line, _print_content)
            print(flush=True)
            tell_unread(answer.problem)
            print(answer.footer, file=sys.stderr)


def _print_content(piece: AttributedText) -> None:
    """Print a piece of the answer; reasoning is left out."""
    if piece.channel == "content":
        print(piece.text, end="", flush=True)


def _as_dict(answer: Answer) -> dict[str, object]:
    shares = {"share_by_draft": answer.share_by("draft"), "share_copied": answer.share_by("lookup")}
    return described(answer.output, answer) | shares | {"metrics": answer.summary.as_dict()}


def _turns(lines: Iterable[str]) -> Iterator[str]:
    """Lines that are not empty, up to /exit."""
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
    """Carry out a command and describe the effect; None if the line is not a command."""
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
    return f"/{name} is no command: {COMMAND_HELP}"


@dataclass(eq=False)
class _Pressed:
    """Whether Ctrl-C was pressed."""

    is_set: bool = False


@contextmanager
def _interruptible() -> Iterator[_Pressed]:
    """Within this context Ctrl-C is noted and interrupts nothing, because a step of the engine must not be
    interrupted."""
    pressed = _Pressed()

    def note(number: int, frame: FrameType | None) -> None:
        pressed.is_set = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)

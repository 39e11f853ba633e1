"""A conversation with a model: its history, its next answer as a stream, and a way to stop that answer.

Owns no model and no terminal. One LLM serves all turns, so the prefix cache holds the conversation so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from aquiline.config import SamplingParams
from aquiline.engine.encode import ending_with
from aquiline.engine.llm import LLM, Output, output_of
from aquiline.engine.sequence import Sequence, TokenDelta
from aquiline.errors import NumericalError
from aquiline.metrics import RunSummary
from aquiline.text.chat_template import ChatTemplate, Message, conversation
from aquiline.text.detokenizer import Detokenizer
from aquiline.types import Source


@dataclass(frozen=True)
class AttributedText:
    """Text that one token made final, and who wrote that token."""

    text: str
    source: Source


@dataclass(frozen=True)
class Answer:
    """One answer of the model and the figures of writing it."""

    output: Output
    summary: RunSummary

    def share_by(self, source: Source) -> float:
        """Share of the answer's tokens that `source` wrote."""
        return self.output.sources.count(source) / max(1, len(self.output.sources))

    @property
    def footer(self) -> str:
        """The figures in one line."""
        s, num_tokens = self.summary, len(self.output.token_ids)
        line = f"{num_tokens} tokens, {s.decode_tokens_per_s:.0f} tok/s"
        if s.counters.num_draft_tokens:
            line += f", tau {s.counters.tau:.2f}, {self.share_by('draft'):.0%} by the draft"
            line += f", {copied:.0%} copied" if (copied := self.share_by("lookup")) else ""
        ends = {"length": "; cut at its longest", "abort": "; stopped"}
        return line + ends.get(self.output.finish_reason, "")


def user_prompt(template: ChatTemplate, text: str, system: str | None = None) -> list[int]:
    """Token ids that ask the model one question."""
    return template.encode(conversation([text], system=system))


class ChatSession:
    """Turns of a user and answers of `llm`, which runs nothing else at the same time.

    `sampling` applies to every answer. Its max_tokens is reduced when less of the context is left."""

    def __init__(self, llm: LLM, template: ChatTemplate, sampling: SamplingParams, system: str | None = None) -> None:
        self.llm, self.template, self.system = llm, template, system
        self.sampling = ending_with(template, sampling)
        self.messages: list[Message] = []  # without the system message
        self._numbers = itertools.count()

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages = []

    def ask(
        self,
        text: str,
        on_piece: Callable[[AttributedText], None] = lambda piece: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Answer:
        """The answer to one more turn of the user. Turn and answer join the history.

        `is_stopped` is called before every step. Once it returns True, the answer ends as it is. Raises ValueError if
        the conversation does not fit or the template refuses it, OutOfPages and NumericalError. The history is then
        unchanged."""
        asked: list[Message] = [*self.messages, {"role": "user", "content": text}]
        system: list[Message] = [] if self.system is None else [{"role": "system", "content": self.system}]
        prompt = self.template.encode([*system, *asked])
        longest = self.llm.engine.max_length
        room = longest - len(prompt)
        if room < 1:
            raise ValueError(
                f"the conversation has {len(prompt)} tokens and the model takes {longest}; begin anew with /reset"
            )
        sampling = replace(self.sampling, max_tokens=min(self.sampling.max_tokens, room))
        answer = self._run(prompt, sampling, on_piece, is_stopped)
        answer = replace(answer, output=replace(answer.output, prompt=text))
        self.messages = [*asked, {"role": "assistant", "content": answer.output.text}]
        return answer

    def _run(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        on_piece: Callable[[AttributedText], None],
        is_stopped: Callable[[], bool],
    ) -> Answer:
        engine = self.llm.engine
        request = self.llm.request(f"turn {next(self._numbers)}", prompt, sampling)
        sequence = engine.add(request)
        began = engine.meter.mark()
        pieces = Detokenizer(self.llm.models.tokenizer, request.prompt_ids, ())
        try:
            while sequence.finish_reason is None:
                for delta in [engine.abort(request.id)] if is_stopped() else engine.step():
                    for piece in _pieces(delta, sequence, pieces):
                        on_piece(piece)
        finally:
            engine.reset()  # whatever was raised, nothing keeps running
        if sequence.error is not None:
            raise NumericalError(sequence.error)
        return Answer(output_of(sequence), engine.meter.since(began))


def _pieces(delta: TokenDelta, sequence: Sequence, detokenizer: Detokenizer) -> Iterator[AttributedText]:
    """The text of a step token by token. A stop token has none."""
    written = list(zip(delta.token_ids, delta.sources, strict=True))
    if delta.finish_reason == "stop" and delta.token_ids[-1] in sequence.eos_token_ids:
        written.pop()
    for token, source in written:
        text = detokenizer.add([token])
        if text:
            yield AttributedText(text, source)
    if delta.finish_reason is not None and (rest := detokenizer.finish()):
        yield AttributedText(rest, sequence.sources[-1])


def pieces_of(output: Output, tokenizer: Tokenizer) -> list[AttributedText]:
    """A finished output as the texts that its tokens wrote. Special tokens write none."""
    detokenizer = Detokenizer(tokenizer, tuple(output.prompt_ids), ())
    pieces = [
        AttributedText(detokenizer.add([token]), source)
        for token, source in zip(output.token_ids, output.sources, strict=True)
    ]
    pieces += [AttributedText(detokenizer.finish(), output.sources[-1])] if output.sources else []
    return [piece for piece in pieces if piece.text]

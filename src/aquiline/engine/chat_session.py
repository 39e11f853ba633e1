"""A conversation with a model: its history, its next answer as a stream, and a way to stop that answer.

Owns no model and no terminal. One LLM serves all turns, so the prefix cache holds the conversation so far.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from aquiline.config import SamplingParams
from aquiline.engine.encode import ending_with
from aquiline.engine.llm import LLM, Output, output_of
from aquiline.engine.model import LoadedModels
from aquiline.errors import NumericalError
from aquiline.metrics import RunSummary
from aquiline.text.chat_template import ChatTemplate, Message, conversation
from aquiline.text.detokenizer import Detokenizer
from aquiline.text.parsers import Channel, Read, Text
from aquiline.text.parsing import Parsing, Reader
from aquiline.types import FinishReason, Source


@dataclass(frozen=True)
class AttributedText:
    """Text that one token made final, who wrote that token, and whether it is the answer or the reasoning."""

    text: str
    source: Source
    channel: Channel = "content"


class AnswerPieces:
    """One answer as the texts that its tokens wrote. Reasoning is told apart in the Harmony format, which is not text
    as the tokens stand; any other answer is all content."""

    def __init__(self, reader: Reader, end_ids: frozenset[int], tells_reasoning: bool) -> None:
        self.reader, self.end_ids, self.tells_reasoning = reader, end_ids, tells_reasoning
        self.pieces: list[AttributedText] = []
        self.last: Source = "target"

    @classmethod
    def of(
        cls, models: LoadedModels, template: ChatTemplate, prompt_ids: tuple[int, ...], sampling: SamplingParams
    ) -> AnswerPieces:
        """Those of an answer to a prompt that the template wrote."""
        assert models.tokenizer is not None, "prompts of templates are text"
        found = Parsing.of(template.source, models.tokenizer)
        parsing = found if found.is_harmony else Parsing()
        reader = parsing.reader(models.tokenizer, prompt_ids, stop=sampling.stop)
        return cls(reader, models.end_ids(sampling), parsing.thinks)

    def take(
        self, token_ids: Sequence[int], sources: Sequence[Source], finish_reason: FinishReason | None
    ) -> list[AttributedText]:
        """The texts that the next tokens made final, token by token. A stop token has none."""
        before, written = len(self.pieces), list(zip(token_ids, sources, strict=True))
        if finish_reason == "stop" and written and written[-1][0] in self.end_ids:
            written.pop()
        for token, source in written:
            self._add(self.reader.take([token], None), source)
        self.last = sources[-1] if sources else self.last
        if finish_reason is not None:
            self._add(self.reader.take([], finish_reason), self.last)
        return self.pieces[before:]

    def _add(self, read: Read, source: Source) -> None:
        self.pieces += [
            AttributedText(part.text, source, part.channel) for part in read.parts if isinstance(part, Text)
        ]

    @property
    def text(self) -> str:
        """The answer so far, without reasoning."""
        return "".join(piece.text for piece in self.pieces if piece.channel == "content")

    @property
    def reasoning(self) -> str | None:
        """The reasoning so far; None where it is not told apart."""
        if not self.tells_reasoning:
            return None
        return "".join(piece.text for piece in self.pieces if piece.channel == "reasoning")


@dataclass(frozen=True)
class Answer:
    """One answer of the model and the figures of writing it. reasoning: None where it is not told apart; problem: what
    of the answer could not be read and is told as text, if anything."""

    output: Output
    summary: RunSummary
    text: str
    reasoning: str | None = None
    problem: str | None = None

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
        thinking = {"thinking": answer.reasoning} if answer.reasoning else {}  # what Harmony's templates call it
        self.messages = [*asked, {"role": "assistant", "content": answer.text} | thinking]
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
        pieces = AnswerPieces.of(self.llm.models, self.template, request.prompt_ids, request.sampling)
        try:
            while sequence.finish_reason is None:
                for delta in [engine.abort(request.id)] if is_stopped() else engine.step():
                    for piece in pieces.take(delta.token_ids, delta.sources, delta.finish_reason):
                        on_piece(piece)
        finally:
            engine.reset()  # whatever was raised, nothing keeps running
        if sequence.error is not None:
            raise NumericalError(sequence.error)
        summary = engine.meter.since(began)
        return Answer(output_of(sequence), summary, pieces.text, pieces.reasoning, pieces.reader.problem)


def pieces_of(output: Output, tokenizer: Tokenizer) -> list[AttributedText]:
    """A finished output as the texts that its tokens wrote. Special tokens write none."""
    detokenizer = Detokenizer(tokenizer, tuple(output.prompt_ids), ())
    pieces = [
        AttributedText(detokenizer.add([token]), source)
        for token, source in zip(output.token_ids, output.sources, strict=True)
    ]
    pieces += [AttributedText(detokenizer.finish(), output.sources[-1])] if output.sources else []
    return [piece for piece in pieces if piece.text]

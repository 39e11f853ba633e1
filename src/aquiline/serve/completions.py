"""Replies of /v1/completions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from aquiline.serve.api_errors import bad_request
from aquiline.serve.chat_completions import prompt_logprobs
from aquiline.serve.choices import Choice, Gain, Job
from aquiline.serve.protocol import CompletionRequest
from aquiline.serve.reply import FINISH_REASONS, ChunkedReply, drafting_so_far, finite, sources, stop_reason, texts
from aquiline.serve.request_prompts import token_text
from aquiline.serve.server_config import Detail
from aquiline.types import TokenLogprobs


@dataclass
class _Logprobs:
    """Columns of the tokens so far. offset: characters before the next token."""

    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[str, float]] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    offset: int = 0

    def columns(self) -> dict[str, list[Any]]:
        """The columns by name."""
        return {name: value for name, value in vars(self).items() if name != "offset"}


class CompletionReply(ChunkedReply):
    """Words a job as a completion. Raises ApiError for an echo with log-probabilities."""

    kind = chunk_kind = "text_completion"

    def __init__(self, job: Job, request: CompletionRequest, detail: Detail, tokenizer: Tokenizer) -> None:
        super().__init__(job, request, detail)
        if request.echo and request.logprobs is not None:
            raise bad_request("echo: is not supported with logprobs; prompt_logprobs has those of the prompt", "echo")
        self.tokenizer = tokenizer
        self.wants_logprobs = request.logprobs is not None
        self.wants_sources = bool(request.return_token_sources)
        self.texts: list[list[str]] = [[] for _ in job.choices]
        self.sources: list[list[dict[str, str]]] = [[] for _ in job.choices]
        self.logprobs = [_Logprobs() for _ in job.choices]

    def begin(self) -> list[bytes]:
        """The prompts where they are to be echoed, else nothing."""
        echoed = [self._echo(place) for place in range(len(self.texts))]
        return [
            self.event([{"index": place, "text": text, "logprobs": None, "finish_reason": None}])
            for place, text in enumerate(echoed)
            if text
        ]

    def add(self, choice: Choice, gain: Gain) -> list[bytes]:
        """A chunk with what the step added to one choice; none where nothing became certain."""
        place, text = self.places[id(choice)], "".join(texts(gain, "content"))
        self.texts[place].append(text)
        told: dict[str, Any] = {"index": place, "text": text, "logprobs": None, "finish_reason": None}
        if self.wants_logprobs and gain.logprobs:
            told["logprobs"] = self._columns(self.logprobs[place], gain.logprobs)
        if self.wants_sources:
            told["sources"] = sources(gain)
            self.sources[place] += told["sources"] if self.is_whole else ()
            told["drafting"] = drafting_so_far(choice)
        if gain.finish_reason is not None:
            told |= self._finish(choice)
        elif not (text or told["logprobs"]):
            return []
        return [self.event([told])]

    def whole(self) -> dict[str, Any]:
        """The reply that is not streamed."""
        choices = []
        for place, choice in enumerate(self.job.choices):
            known = self.logprobs[place]
            columns = None
            if self.wants_logprobs:
                columns = known.columns()
            told: dict[str, Any] = {
                "index": place, "text": self._echo(place) + "".join(self.texts[place]), "logprobs": columns,
            }  # fmt: skip
            if self.wants_sources:
                told["sources"] = self.sources[place]
            if choice.request.sampling.prompt_logprobs is not None:
                told["prompt_logprobs"] = prompt_logprobs(self.tokenizer, choice)
            choices.append(told | self._finish(choice))
        return self.reply(choices)

    def _echo(self, place: int) -> str:
        """The prompt of a choice as it is echoed, "" where it is not."""
        request = self.request
        assert isinstance(request, CompletionRequest)
        if not request.echo:
            return ""
        prompt, place = request.prompt, place // self.job.wanted.n
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[place], str):
            return str(prompt[place])
        text: str = self.tokenizer.decode(self.job.prompts[place], skip_special_tokens=True)
        return text

    def _columns(self, known: _Logprobs, entries: list[TokenLogprobs]) -> dict[str, Any]:
        """The columns of new tokens, which join those that are known where these are sent at the end."""
        new = _Logprobs(offset=known.offset)
        for entry in entries:
            text = token_text(self.tokenizer, entry.token_id)
            new.tokens.append(text)
            new.token_logprobs.append(finite(entry.logprob))
            named = {token_text(self.tokenizer, token): finite(logprob) for token, logprob in entry.top.items()}
            new.top_logprobs.append({text: finite(entry.logprob)} | named)
            new.text_offset.append(new.offset)
            new.offset += len(text)
        known.offset, columns = new.offset, new.columns()
        for name, column in columns.items() if self.is_whole else ():
            getattr(known, name).extend(column)
        return columns

    @staticmethod
    def _finish(choice: Choice) -> dict[str, Any]:
        assert choice.finish_reason is not None
        return {"finish_reason": FINISH_REASONS[choice.finish_reason], "stop_reason": stop_reason(choice)}

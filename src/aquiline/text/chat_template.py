"""A target's chat template, which turns conversations into prompts. Commands, server and training all use it.

The template renders text, and the engine's own tokenizer encodes it, so that prompts and answers share one vocabulary.
Templates are Jinja in a sandbox, with the filters, functions and tags that checkpoints rely on.
Source of the expected names and settings: transformers 5.23, utils/chat_template_utils.py.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from aquiline.checks import is_unicode
from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf, read_json
from aquiline.text.gguf_tokenizer import chat_template, special_tokens
from aquiline.text.loss_mask import (
    AnswerSpan,
    MaskedTokens,
    Message,
    Rendered,
    exact_offsets,
    find_answers,
    find_marked,
    mask_tokens,
)

__all__ = ["ChatTemplate", "MaskedTokens", "Message", "conversation"]

ANSWER_MARKS = ("_answer_begins", "_answer_ends")
"""Variables that a caller may set to strings: they are written around the body of every `{% generation %}` block."""

_MESSAGE_GAP = "\n\n"
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode assigns them to no character


class ChatTemplate:
    """The form in which a target expects a conversation. `template`, kept as `source`, is Jinja, or None.

    With a template the prompt ends where the model's turn begins, and the template writes all special tokens. Without
    one the messages follow one another with an empty line between them, inside the special tokens that the tokenizer
    puts around a text. A single turn is then its plain text.

    `special` are the named special tokens a template may write ("bos_token": "<s>"), `options` further values for it,
    for example {"enable_thinking": False}. `name` appears in errors. Raises CheckpointError for a template that is not
    Jinja, ValueError for options without a template.
    """

    def __init__(
        self,
        template: str | None,
        special: dict[str, str],
        tokenizer: Tokenizer | None,
        options: dict[str, object] | None = None,
        name: str = "the chat template",
    ) -> None:
        self.special, self.tokenizer, self.options, self.name = special, tokenizer, options or {}, name
        self.source = template
        self._compiled: CompiledTemplate | None = None
        if template is not None:
            try:
                self._compiled = compile_template(template)
            except TemplateSyntaxError as error:
                raise CheckpointError(
                    f"{name}: is not Jinja ({error}, line {error.lineno}); download it again"
                ) from None
        elif self.options:
            raise ValueError(f"options={self.options}: {name} has no chat template to pass them to; drop them")

    @classmethod
    def load(cls, checkpoint: Path, tokenizer: Tokenizer | None) -> ChatTemplate:
        """The template of a checkpoint: in a directory chat_template.jinja, else `chat_template` in
        tokenizer_config.json, a string or a list of named ones of which "default" is taken; in a GGUF file that of its
        metadata. Raises CheckpointError for a broken file."""
        name = f"the chat template of {checkpoint}"
        if is_gguf(checkpoint):
            return cls(chat_template(checkpoint), special_tokens(checkpoint), tokenizer, None, name)
        config_file, own_file = checkpoint / "tokenizer_config.json", checkpoint / "chat_template.jinja"
        config = read_json(config_file) if config_file.is_file() else {}
        template = config.get("chat_template")
        if own_file.is_file():
            template = own_file.read_text(encoding="utf-8")
        elif isinstance(template, list):
            template = _default_of(template, config_file)
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{config_file}: chat_template must be a text or a list of named texts")
        map_file = checkpoint / "special_tokens_map.json"
        special = _special_tokens(read_json(map_file)) if map_file.is_file() else {}
        return cls(template or None, special | _special_tokens(config), tokenizer, None, name)

    def with_options(self, options: Mapping[str, object], name: str | None = None) -> ChatTemplate:
        """The same template with further `options`, such as {"tools": [...]}, which override its own. name: its name in
        errors, if readers must not see paths. Raises ValueError for options without a template."""
        if options and not self.has_template:
            raise ValueError(f"{self.name} does not exist, so it cannot be given {', '.join(options)}; drop them")
        other = copy.copy(self)
        other.options, other.name = self.options | dict(options), name or self.name
        return other

    @property
    def has_template(self) -> bool:
        """Whether the target has a chat template."""
        return self._compiled is not None

    @property
    def notice(self) -> str | None:
        """A line for the user that says that there is no template. None if there is one."""
        if self.has_template:
            return None
        return f"{self.name} does not exist: messages are written one after another and continued as plain text"

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as text, ready for the model's next answer with add_generation_prompt.

        Raises ValueError if the template refuses the messages."""
        return self._render(messages, add_generation_prompt, {})

    def encode(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """Token ids of `render`. Raises ValueError if the template refuses the messages, or without a tokenizer."""
        text = self.render(messages, add_generation_prompt)
        ids: list[int] = self._known_tokenizer.encode(text, add_special_tokens=not self.has_template).ids
        return ids

    def encode_with_mask(self, messages: Sequence[Message]) -> MaskedTokens:
        """The whole conversation as tokens. The mask is true for tokens that the model itself would have written: the
        content of every answer and the token that ends its turn, but not the header before it or the line break after
        it.

        Where a template marks answers (`{% generation %}`), these marks count; otherwise answers are found as
        `find_answers` says. Raises ValueError naming template and message if the template writes an answer otherwise
        once more turns follow; `encode_answers` handles such conversations."""
        texts = self._answers(messages)
        if len(texts) > 1:
            raise ValueError(
                f"{self.name}: message {texts[1].num_messages}, an answer: is written otherwise once more turns "
                "follow; encode the conversation up to it by itself"
            )
        return self._mask(texts[0])

    def encode_answers(self, messages: Sequence[Message]) -> list[MaskedTokens]:
        """Tokens that together hold every answer once, as the model would have written it.

        For most templates the result is one entry, the whole conversation. Where a template rewrites an answer once
        more turns follow, there is a further entry: the conversation up to that answer. Raises ValueError naming
        template and message where an answer cannot be found."""
        return [self._mask(text) for text in self._answers(messages) if text.answers]

    @cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The id of the special token that ends an answer. Empty if answers end without a special token, or if the
        template refuses the plain answer by which the token is found."""
        try:
            masked = self.encode_answers(conversation(["Hi"], ["Hello"], complete=True))[0]
        except ValueError:
            return ()
        last = int(masked.ids[np.flatnonzero(masked.mask)[-1]])
        return (last,) if last in self._special_ids else ()

    def check_ends(self, vocab_size: int) -> None:
        """Raises CheckpointError if answers end with a token that a model of so many tokens does not have."""
        beyond = [token for token in self.end_ids if token >= vocab_size]
        if beyond:
            raise CheckpointError(
                f"{self.name}: ends an answer with token {beyond[0]}, and the model has {vocab_size} tokens; take the "
                "tokenizer and the template that it was trained with"
            )

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, marks: dict[str, str]) -> str:
        text = self._written(messages, add_generation_prompt, marks)
        if not is_unicode(text):
            raise ValueError("a message holds half a surrogate pair, which is no text; write the character whole")
        return text

    def _written(self, messages: Sequence[Message], add_generation_prompt: bool, marks: dict[str, str]) -> str:
        if self._compiled is None:
            return _MESSAGE_GAP.join(message["content"] for message in messages)
        given = [{key: value for key, value in message.items() if value is not None} for message in messages]
        values: dict[str, Any] = {"tools": None, "documents": None} | self.special | self.options | marks
        try:
            return self._compiled.template.render(messages=given, add_generation_prompt=add_generation_prompt, **values)
        except (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ValueError(f"{self.name} refused messages of {roles}: {error}") from None

    def _answers(self, messages: Sequence[Message]) -> list[Rendered]:
        bad = [place for place, message in enumerate(messages) if not isinstance(message.get("content"), str)]
        if bad:
            raise ValueError(f"message {bad[0] + 1}: its content is no text")
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(f"the {len(messages)} messages hold no answer of the assistant")
        if self._compiled is None:
            return [self._plain(messages)]
        if not self._compiled.marks_answers:
            return find_answers(self.render, messages, self.name)
        taken = set(self.render(messages, False))
        begin, end = itertools.islice((mark for mark in _NONCHARACTERS if mark not in taken), 2)
        marked = self._render(messages, False, dict(zip(ANSWER_MARKS, (begin, end), strict=True)))
        return [find_marked(self.render, messages, marked, (begin, end), self.name)]

    def _plain(self, messages: Sequence[Message]) -> Rendered:
        spans, at = [], 0
        for message in messages:
            if message["role"] == "assistant":
                spans.append(AnswerSpan(at, at + len(message["content"])))
            at += len(message["content"]) + len(_MESSAGE_GAP)
        return Rendered(self.render(messages, False), len(messages), spans)

    def _mask(self, rendered: Rendered) -> MaskedTokens:
        return mask_tokens(self._exact_tokenizer, rendered, self._special_ids, self._head)

    @property
    def _known_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{self.name}: its target has no tokenizer.json, and messages are text; add one")
        return self.tokenizer

    @cached_property
    def _exact_tokenizer(self) -> Tokenizer:
        return exact_offsets(self._known_tokenizer)

    @cached_property
    def _head(self) -> list[int]:
        """The tokens that the tokenizer puts before a text; empty with a template, which writes them itself."""
        if self.has_template:
            return []
        encoding = self._known_tokenizer.encode("a")
        return list(encoding.ids[: list(encoding.special_tokens_mask).index(0)])

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        tokenizer = self._known_tokenizer
        ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        named = {tokenizer.token_to_id(token) for token in self.special.values()}
        return frozenset(ids | {i for i in named if i is not None})


def conversation(
    turns: Sequence[str], answers: Sequence[str] = (), system: str | None = None, complete: bool = False
) -> list[Message]:
    """Messages of the user's turns and the model's answers between them, ready for its next answer.

    `answers` are one fewer than `turns`, or as many with `complete`. Raises ValueError for another number."""
    if len(answers) != len(turns) - (not complete):
        raise ValueError(f"answers: {len(answers)} given; {len(turns)} turns take {len(turns) - (not complete)}")
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    for place, turn in enumerate(turns):
        messages.append({"role": "user", "content": turn})
        messages += [{"role": "assistant", "content": answer} for answer in answers[place : place + 1]]
    return messages


def _default_of(templates: list[Any], file: Path) -> Any:
    """The template named "default" of a list of named ones."""
    try:
        named = {entry["name"]: entry["template"] for entry in templates}
    except (TypeError, KeyError):
        raise CheckpointError(f"{file}: chat_template must be a list of objects with name and template") from None
    if "default" not in named:
        raise CheckpointError(f"{file}: has chat templates {', '.join(map(str, named))}, none named default")
    return named["default"]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens, each a string or an object with `content`; those of extra_special_tokens too."""
    extra = config.get("extra_special_tokens")
    named = {key: value for key, value in config.items() if key.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


class GenerationBlock(Extension):
    """The tag `{% generation %} ... {% endgeneration %}`, with which a template says what the model itself writes."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body in a scope of its own, between the variables of ANSWER_MARKS, which are empty unless set."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (nodes.Output([nodes.Name(name, "load")]) for name in ANSWER_MARKS)
        return [node.set_lineno(line) for node in (begin, nodes.Scope(body), end)]


@dataclass(frozen=True)
class CompiledTemplate:
    """A template ready to render; marks_answers: whether it has a `{% generation %}` block."""

    template: Template
    marks_answers: bool


def compile_template(source: str) -> CompiledTemplate:
    """Compile a chat template. Raises jinja2.TemplateSyntaxError.

    A rendering raises jinja2.TemplateError for what the sandbox forbids and for what the template itself refuses."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    names = {name.name for name in environment.parse(source).find_all(nodes.Name)}
    return CompiledTemplate(environment.from_string(source), ANSWER_MARKS[0] in names)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is; Jinja's own filter would write < and > as escapes, for web pages."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)

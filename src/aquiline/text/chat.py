"""A conversation so far as the token ids a target continues, through its chat template where it has one.

The template renders text; the engine's own tokenizer encodes it, so that prompts and answers share one vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf, read_json
from aquiline.text.gguf_tokenizer import chat_template, special_tokens

_BETWEEN = "\n\n"


class ChatPrompter:
    """Renders conversations for the target in `directory` or a GGUF file, whose tokenizer is `tokenizer`.

    With a template (chat_template.jinja, tokenizer_config.json or GGUF metadata) the prompt ends where the model's turn
    begins, and special tokens are those the template writes. Without one the messages stand after one another, an empty
    line between, inside the special tokens that the tokenizer puts around a text: a single turn is then its plain text.
    `options` go to the template, for example {"enable_thinking": False}. Raises CheckpointError for a broken template
    or tokenizer, ValueError without a tokenizer.
    """

    def __init__(self, directory: Path, tokenizer: Tokenizer | None, options: dict[str, object] | None = None) -> None:
        if tokenizer is None:
            raise ValueError(f"target={str(directory)!r}: has no tokenizer.json, and questions are text; add one")
        self.directory, self.tokenizer, self.options = directory, tokenizer, options or {}
        self._renderer = _load_renderer(directory, tokenizer) if _has_template(directory) else None
        if self.options and self._renderer is None:
            raise ValueError(f"options={self.options}: {directory} has no chat template to pass them to; drop them")

    @property
    def has_template(self) -> bool:
        """Whether the target has a chat template."""
        return self._renderer is not None

    def encode(self, turns: Sequence[str], answers: Sequence[str] = (), system: str | None = None) -> list[int]:
        """Token ids of the user's turns so far, the model's answers between them, ready for its next answer.

        `answers` are one fewer than `turns`. Raises ValueError for another number, and if the template refuses the
        conversation."""
        text = self.render(turns, answers, system)
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=not self.has_template).ids
        return ids

    def render(self, turns: Sequence[str], answers: Sequence[str] = (), system: str | None = None) -> str:
        """The text that `encode` encodes."""
        if len(answers) != len(turns) - 1:
            raise ValueError(f"answers: {len(answers)} given; {len(turns)} turns take one fewer than turns")
        messages = [] if system is None else [{"role": "system", "content": system}]
        for place, turn in enumerate(turns):
            messages.append({"role": "user", "content": turn})
            messages += [{"role": "assistant", "content": answer} for answer in answers[place : place + 1]]
        if self._renderer is None:
            return _BETWEEN.join(message["content"] for message in messages)
        from jinja2 import TemplateError

        try:
            text: str = self._renderer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.options
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template of {self.directory} refused messages of {roles}: {error}") from None
        return text


def _has_template(directory: Path) -> bool:
    if is_gguf(directory):
        return chat_template(directory) is not None
    config = directory / "tokenizer_config.json"
    has_field = config.is_file() and bool(read_json(config).get("chat_template"))
    return has_field or (directory / "chat_template.jinja").is_file()


def _load_renderer(directory: Path, tokenizer: Tokenizer) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(directory):
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, chat_template=chat_template(directory), **special_tokens(directory)
        )
    try:
        renderer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        renderer.get_chat_template()
    except Exception as error:  # whatever a tokenizer class raises: OSError, ValueError, ImportError, KeyError
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{directory}: its chat template needs a tokenizer that transformers can load ({reason}); save it again "
            "with save_pretrained, or remove the template"
        ) from None
    return renderer

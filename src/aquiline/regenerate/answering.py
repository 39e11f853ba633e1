"""One conversation while the target answers it: the token ids that the engine computed on, and which the target wrote.

No answer is tokenised again. The prompt of the next turn is the ids so far, followed by the ids of the text that the
chat template writes between the end of one answer and the beginning of the next. If the tokenizer would encode an
answer with other ids, the engine's ids are kept.

With a draft, the conversation also says which tokens the draft missed: training can replay these errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from aquiline.engine.llm import Output
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.questions import Question

_ANSWER = "\ufdd0"  # stands for an answer; a code point that Unicode assigns to no character, so no text holds it


@dataclass(frozen=True)
class PromptRow:
    """The prompt of the next turn: the first `num_kept` ids of the conversation, then the ids `added`.

    messages: the messages of the conversation, the next turn of the user included."""

    messages: list[dict[str, str]]
    num_kept: int
    added: list[int]


@dataclass(eq=False)
class Conversation:
    """The user's turns of `question`, answered one after the other at one temperature, under one seed.

    token_ids: prompts and answers so far. loss_mask: per id, 1 if the target wrote it, else 0. rejected: per id, 1 if
    verification put it in the place of a drafted token, else 0. num_spec_tokens: length of the drafted chains; 0
    without drafting, and a row then has no field `rejected`."""

    id: int
    question: Question
    labels: dict[str, object]  # copied from the input row
    temperature: float
    seed: int
    num_spec_tokens: int = 0
    messages: list[dict[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)
    prompt: PromptRow | None = None  # of the turn that is asked and not answered yet

    @property
    def num_left(self) -> int:
        """Turns without an answer."""
        return len(self.question.turns) - len(self.finish_reasons)

    def ask(self, template: ChatTemplate, tokenizer: Tokenizer) -> list[int]:
        """Ask the next turn; returns the prompt's ids. Raises ValueError if the template refuses the turn."""
        turn = {"role": "user", "content": self.question.turns[len(self.finish_reasons)]}
        if self.finish_reasons:
            self.prompt = self._next(turn, template, tokenizer)
        else:
            system = self.question.system
            messages = [turn] if system is None else [{"role": "system", "content": system}, turn]
            self.prompt = PromptRow(messages, 0, template.encode(messages))
        return self.token_ids[: self.prompt.num_kept] + self.prompt.added

    def _next(self, turn: dict[str, str], template: ChatTemplate, tokenizer: Tokenizer) -> PromptRow:
        """The prompt of a later turn. An answer that ended by itself ends with a stop token. That token is kept if the
        template writes the same one; otherwise the template's end of a turn replaces it. An answer that was cut gets
        the template's end of a turn."""
        text = template.render([*self.messages[:-1], {"role": "assistant", "content": _ANSWER}, turn])
        if text.count(_ANSWER) != 1:
            raise ValueError(
                f"the chat template writes an earlier answer {text.count(_ANSWER)} times, not once, so that its "
                "conversations cannot be continued; give single turns"
            )
        added: list[int] = tokenizer.encode(text.partition(_ANSWER)[2], add_special_tokens=False).ids
        num_kept = len(self.token_ids)
        if self.finish_reasons[-1] == "stop":
            if added[:1] == self.token_ids[-1:]:
                added = added[1:]
            else:
                num_kept -= 1
        return PromptRow([*self.messages, turn], num_kept, added)

    def answer(self, output: Output) -> None:
        """Add the target's answer to the turn that was asked."""
        prompt = self.prompt
        assert prompt is not None and output.prompt_ids == self.token_ids[: prompt.num_kept] + prompt.added
        self.messages = [*prompt.messages, {"role": "assistant", "content": output.text}]
        self.loss_mask = self.loss_mask[: prompt.num_kept] + [0] * len(prompt.added) + [1] * len(output.token_ids)
        if self.num_spec_tokens:
            missed = rejected_tokens(output.by_draft, self.num_spec_tokens)
            self.rejected = self.rejected[: prompt.num_kept] + [0] * len(prompt.added) + missed
        self.token_ids = output.prompt_ids + output.token_ids
        self.finish_reasons.append(output.finish_reason)
        self.prompt = None

    def row(self) -> dict[str, object]:
        """The conversation as a row of the output; turns that were not answered are counted in num_turns_left."""
        left: dict[str, object] = {"num_turns_left": self.num_left} if self.num_left else {}
        row = {"id": self.id} | self.labels | left | {
            "temperature": self.temperature,
            "seed": self.seed,
            "finish_reasons": self.finish_reasons,
            "messages": self.messages,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
        }  # fmt: skip
        return row | {"rejected": self.rejected} if self.num_spec_tokens else row


def rejected_tokens(by_draft: Sequence[bool], num_spec_tokens: int) -> list[int]:
    """Per token of an answer, 1 if it replaced a drafted token, else 0. by_draft: which tokens the draft wrote.

    The first token comes from the prompt. Every later step commits the accepted tokens of a chain and one token of the
    target's own. That token stands in the place of a rejected one, unless the whole chain was accepted."""
    rejected, num_accepted = [], 0
    for at, is_drafted in enumerate(by_draft):
        rejected.append(int(not is_drafted and at > 0 and num_accepted < num_spec_tokens))
        num_accepted = num_accepted + 1 if is_drafted else 0
    return rejected

"""Conversations with a model: history, pieces of text and who wrote them, stopping, and what leaves no trace."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import engine_config, tiny_models
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.chat_session import AttributedText, ChatSession, user_prompt
from aquiline.engine.llm import LLM
from aquiline.errors import CheckpointError
from aquiline.spec.drafting import Chain
from aquiline.text.chat_template import ChatTemplate
from aquiline.text.loss_mask import Message

END = "<E>"
LETTERS = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(90)}, unk_token="!"))
LETTERS.pre_tokenizer = pre_tokenizers.Split("", "isolated")
LETTERS.decoder = decoders.Fuse()
LETTERS.add_special_tokens([END])
SOURCE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}<E>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
ALWAYS_END = {LETTERS.token_to_id(END): 1e6}
SHORT = SamplingParams(max_tokens=8, temperature=0.9, seed=1, ignore_eos=True)


def session(sampling: SamplingParams = SHORT, source: str | None = SOURCE, **settings: Any) -> ChatSession:
    loaded = dataclasses.replace(tiny_models(), tokenizer=LETTERS)
    llm = LLM.from_models(loaded, engine_config(1, prefix_cache=True, **settings))
    return ChatSession(llm, ChatTemplate(source, {}, LETTERS), sampling)


def test_an_answer_joins_the_history_the_next_one_is_asked_with() -> None:
    chat = session()
    chat.system = "sys"
    first, second = chat.ask("hello"), chat.ask("more")
    assert first.output.prompt_ids == LETTERS.encode("s:sysu:helloa:").ids and first.output.prompt == "hello"
    text = f"s:sysu:helloa:{first.output.text}<E>u:morea:"
    assert second.output.prompt_ids == LETTERS.encode(text).ids
    assert [m["content"] for m in chat.messages] == ["hello", first.output.text, "more", second.output.text]
    assert second.summary.counters.num_prefix_hits > 0, "the conversation so far is in the prefix cache"
    chat.reset()
    assert chat.ask("hello").output.token_ids == first.output.token_ids


def test_pieces_are_the_text_and_say_who_wrote_it() -> None:
    llm = LLM("bundled", drafting=Chain(3), engine=EngineConfig(max_batch=1, max_context=300))
    chat = ChatSession(llm, ChatTemplate(None, {}, llm.models.tokenizer), SamplingParams(max_tokens=60))
    pieces: list[AttributedText] = []
    answer = chat.ask('def greet(name):\n    """Grüße é"""\n', pieces.append)
    assert "".join(piece.text for piece in pieces) == answer.output.text
    assert len(pieces) > 40 and answer.share_by("draft") == sum(answer.output.by_draft) / 60 > 0.3
    assert sum(piece.source != "target" for piece in pieces) == pytest.approx(sum(answer.output.by_draft), abs=3)
    assert (
        answer.output.text
        == llm.generate('def greet(name):\n    """Grüße é"""\n', SamplingParams(max_tokens=60))[0].text
    )
    assert f"60 tokens, {answer.summary.decode_tokens_per_s:.0f} tok/s, tau " in answer.footer
    assert answer.footer.endswith("by the draft; cut at its longest")


def test_the_end_of_a_turn_ends_an_answer_and_is_not_shown() -> None:
    pieces: list[AttributedText] = []
    answer = session(dataclasses.replace(SHORT, logit_bias=ALWAYS_END)).ask("hello", pieces.append)
    assert answer.output.finish_reason == "stop" and answer.output.token_ids == list(ALWAYS_END)
    assert answer.output.text == "" and not pieces
    letter = dataclasses.replace(SHORT, logit_bias={5: 1e6}, stop_token_ids=(5,))  # a stop token that is no special one
    answer = session(letter).ask("hello", pieces.append)
    assert answer.output.finish_reason == "stop" and answer.output.text == "" and not pieces


def test_an_answer_stops_between_two_steps() -> None:
    chat = session(dataclasses.replace(SHORT, max_tokens=200))
    pieces: list[AttributedText] = []
    answer = chat.ask("hello", pieces.append, lambda: len(pieces) >= 5)
    assert answer.output.finish_reason == "abort" and 5 <= len(answer.output.token_ids) < 12
    assert answer.output.text == "".join(piece.text for piece in pieces) == chat.messages[-1]["content"]
    assert answer.footer.endswith("; stopped") and not chat.llm.engine.is_busy
    assert chat.ask("more").output.text
    nothing = chat.ask("again", is_stopped=lambda: True)
    assert nothing.output.text == "" and nothing.share_by("draft") == 0


def test_what_fails_leaves_the_history_and_the_engine_as_they_were() -> None:
    chat = session()
    chat.ask("hello")
    before = list(chat.messages)

    def fail(piece: AttributedText) -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="gone"):
        chat.ask("more", fail)
    with pytest.raises(
        ValueError, match=r"the conversation has 4.. tokens and the model takes 400; begin anew with /reset"
    ):
        chat.ask("x" * 400)
    assert chat.messages == before and not chat.llm.engine.is_busy
    assert chat.ask("more").output.finish_reason == "length"


def test_an_answer_takes_no_more_than_the_context_has() -> None:
    chat = session(dataclasses.replace(SHORT, max_tokens=500), max_context=60)
    answer = chat.ask("hello")
    assert len(answer.output.token_ids) == 60 - len("u:helloa:") and answer.output.finish_reason == "length"


def test_one_question_is_written_by_the_template_or_as_plain_text() -> None:
    assert user_prompt(ChatTemplate(SOURCE, {}, LETTERS), "hi", "sys") == LETTERS.encode("s:sysu:hia:").ids
    plain = ChatTemplate(None, {}, LETTERS, name="the template of T")
    assert user_prompt(plain, "hi") == LETTERS.encode("hi").ids
    assert plain.notice is not None and plain.notice.startswith("the template of T does not exist: ")
    assert ChatTemplate(SOURCE, {}, LETTERS).notice is None


HELLO: list[Message] = [{"role": "user", "content": "hello"}]
LONGER: list[Message] = [
    {"role": "system", "content": "sys"}, *HELLO, {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "more"},
]  # fmt: skip


def chatty(folder: Path, source: str = SOURCE, tokenizer: Tokenizer = LETTERS) -> LLM:
    """An LLM whose target brings a chat template."""
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": source}))
    loaded = dataclasses.replace(tiny_models(), tokenizer=tokenizer, checkpoint=folder)
    return LLM.from_models(loaded, engine_config(4))


def test_an_llm_answers_one_conversation_or_several(tmp_path: Path) -> None:
    llm = chatty(tmp_path)
    [one] = llm.chat(HELLO, SHORT)
    assert one.prompt_ids == LETTERS.encode("u:helloa:").ids
    asked = session().ask("hello").output
    assert (one.token_ids, one.text, one.finish_reason) == (asked.token_ids, asked.text, asked.finish_reason)
    first, second = llm.chat([HELLO, LONGER], [SHORT, dataclasses.replace(SHORT, max_tokens=5)], drafting=Chain(3))
    assert first.token_ids == one.token_ids and first.metrics.num_draft_tokens > 0
    assert second.prompt_ids == LETTERS.encode("s:sysu:helloa:hi<E>u:morea:").ids and len(second.token_ids) == 5
    assert [o.finish_reason for o in llm.chat([HELLO], dataclasses.replace(SHORT, logit_bias=ALWAYS_END))] == ["stop"]
    by_default, text = llm.chat(HELLO)[0].token_ids, llm.generate("u:helloa:")[0].token_ids
    assert by_default == text[: text.index(LETTERS.token_to_id(END)) + 1], "up to the end of the turn"


def test_a_chat_without_a_template_continues_the_text() -> None:
    llm = session().llm
    assert llm.chat(LONGER, SHORT)[0].prompt_ids == LETTERS.encode("sys\n\nhello\n\nhi\n\nmore").ids
    with pytest.raises(ValueError, match="cannot be given tools; drop them"):
        llm.chat(HELLO, tools=[{"type": "function"}])


def test_tools_and_options_reach_the_template(tmp_path: Path) -> None:
    llm = chatty(tmp_path, SOURCE + "{{ tools[0].name if tools else '-' }}{{ style }}")
    [one] = llm.chat(HELLO, SHORT, tools=[{"name": "add"}], template_options={"style": "x"})
    assert one.prompt_ids == LETTERS.encode("u:helloa:addx").ids
    calling = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert llm.chat(calling, SHORT)[0].prompt_ids == LETTERS.encode("u:helloa:<E>a:-").ids


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], r"messages=\[\]: must be a list of messages, or a list of such lists"),
        ("hello", "messages='hello': must be a list of messages"),
        ({"role": "user", "content": "a"}, "must be a list of messages"),
        ([HELLO, []], r"messages\[1\]=\[\]: must be a list of messages that is not empty"),
        ([HELLO, "hello"], r"messages\[1\]='hello'"),
        ([*HELLO, "hello"], r"messages\[0\]\[1\]='hello': must be a dict with role and content, both texts"),
        ([{"role": "user"}], r"messages\[0\]\[0\]=.*both texts"),
        ([{"role": 1, "content": "a"}], "both texts"),
        ([{"role": "user", "content": ["a"]}], "both texts"),
        ([HELLO, [{"role": "user", "content": "\ud800"}]], "half a surrogate pair"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, message: str) -> None:
    llm = session().llm
    with pytest.raises(ValueError, match=message):
        llm.chat(messages, SHORT)
    assert not llm.engine.is_busy


def test_a_template_that_ends_answers_with_a_token_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Every request of a chat would be refused for it."""
    letters = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(96)}, unk_token="!"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.add_special_tokens([END])
    llm = chatty(tmp_path, SOURCE, letters)
    told = f"the chat template of {tmp_path}: ends an answer with token 96, and the model has 96 tokens"
    for use in (lambda: llm.chat(HELLO), lambda: llm.template()):
        with pytest.raises(CheckpointError, match=re.escape(told)):
            use()

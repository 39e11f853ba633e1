"""Recorded answers in the Harmony format, cut everywhere: the same parts, the same reasoning, no text lost."""

from __future__ import annotations

import random
import re
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.text.families import HARMONY, SMOLLM2, SPECIAL, byte_tokenizer
from tokenizers import Tokenizer

from aquiline.text.chat_template import ChatTemplate
from aquiline.text.detokenizer import Detokenizer
from aquiline.text.harmony import MARKERS, MAX_HEADER_TOKENS, Harmony
from aquiline.text.parsers import Call, Part, Plain, Read, Text
from aquiline.text.parsing import Parsing, TextReader
from aquiline.types import FinishReason

TOKENIZER = byte_tokenizer()
LITERAL = byte_tokenizer()
LITERAL.encode_special_tokens = True  # markers become letters
NEXT = "<|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>We need 2+2.<|end|>"
ADD = Call("add", '{"a": 2, "b": 2}')


def reasoning(text: str) -> Text:
    return Text("reasoning", text)


def content(text: str) -> Text:
    return Text("content", text)


class Recorded(NamedTuple):
    """What a model wrote after `<|start|>assistant`, why it ended, what that is, and what is said not to be read.
    Between U+0001 and U+0002 markers are letters."""

    text: str
    reason: FinishReason
    parts: list[Part]
    problem: str | None = None


RECORDED = {
    "analysis and final": Recorded(
        f"{THOUGHT}{NEXT}<|channel|>final<|message|>2+2 = 4.<|return|>",
        "stop", [reasoning("We need 2+2."), content("2+2 = 4.")],
    ),
    "final alone": Recorded("<|channel|>final<|message|>Hello!<|return|>", "stop", [content("Hello!")]),
    "a call with a type": Recorded(
        f'{THOUGHT}{NEXT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>{{"a":2,"b":2}}<|call|>',
        "stop", [reasoning("We need 2+2."), ADD],
    ),
    "recipient behind the role": Recorded(
        f'{THOUGHT}{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 2, "b": 2}}<|call|>',
        "stop", [reasoning("We need 2+2."), ADD],
    ),
    "recipient behind the prompt's role": Recorded(
        ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 2, "b": 2}<|call|>', "stop", [ADD],
    ),
    "a call without channel and type": Recorded(
        ' to=functions.add<|message|>{"a": 2, "b": 2}<|call|>', "stop", [ADD],
    ),
    "a call on the channel of reasoning": Recorded(
        '<|channel|>analysis to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}<|call|>', "stop", [ADD],
    ),
    "a call without arguments": Recorded(
        "<|channel|>commentary to=functions.now<|message|><|call|>", "stop", [Call("now", "{}")],
    ),
    "preamble and call": Recorded(
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I will add.<|end|>{NEXT}<|channel|>commentary "
        'to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}<|call|>',
        "stop", [reasoning("We need 2+2."), content("I will add."), ADD],
    ),
    "several calls": Recorded(
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}<|call|>'
        f'{NEXT}<|channel|>commentary to=functions.say <|constrain|>json<|message|>{{"x": "é"}}<|end|>'
        f'{NEXT} to=functions.add<|channel|>commentary json<|message|>{{"a": 2, "b": 2}}<|call|>',
        "stop", [ADD, Call("say", '{"x": "é"}'), ADD],
    ),
    "messages of one channel": Recorded(
        f"<|channel|>commentary<|message|>First.<|end|>{THOUGHT}{THOUGHT}{NEXT}<|channel|>final<|message|>Last.",
        "stop",
        [content("First."), reasoning("We need 2+2.\n\nWe need 2+2."), content("\n\nLast.")],
    ),
    "characters": Recorded(
        f"<|channel|>analysis<|message|>naïve → 🦅🦅<|end|>{NEXT}<|channel|>final<|message|>日本語 🦅 é<|return|>",
        "stop", [reasoning("naïve → 🦅🦅"), content("日本語 🦅 é")],
    ),
    "markers as letters": Recorded(
        f"<|channel|>analysis<|message|>It ends with \1<|end|>\2.<|end|>{NEXT}<|channel|>final<|message|>Write "
        "\1<|end|><|start|>assistant<|channel|>final<|message|>\2.<|return|>",
        "stop",
        [reasoning("It ends with <|end|>."), content("Write <|end|><|start|>assistant<|channel|>final<|message|>.")],
    ),
    "a final of JSON": Recorded(
        '<|channel|>final <|constrain|>json<|message|>{"a": 1}<|return|>', "stop", [content('{"a": 1}')],
    ),
    "ended by another token": Recorded("<|channel|>final<|message|>Hello<|endoftext|>", "stop", [content("Hello")]),
    "cut in reasoning": Recorded("<|channel|>analysis<|message|>We ne", "length", [reasoning("We ne")]),
    "cut in a character": Recorded("<|channel|>final<|message|>One 🦅", "length", [content("One 🦅")]),
    "cut in a header": Recorded(
        f"{THOUGHT}{NEXT}<|channel|>fin", "length", [reasoning("We need 2+2."), content("fin")],
        "a header has no message",
    ),
    "cut behind the role": Recorded(
        f"{THOUGHT}{NEXT}", "length", [reasoning("We need 2+2.")], "a header has no message",
    ),
    "cut in a call": Recorded(
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2,', "length",
        [content('commentary to=functions.add json{"a": 2,')], "the arguments of a call of 'add' are no JSON object",
    ),
    "cut behind a whole call": Recorded(
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2, "b": 2}', "length", [ADD],
    ),
    "wrong JSON": Recorded(
        '<|channel|>commentary to=functions.add json<|message|>{"a": NaN}<|call|>', "stop",
        [content('commentary to=functions.add json{"a": NaN}')], "the arguments of a call of 'add' are no JSON object",
    ),
    "arguments that are no object": Recorded(
        f"{THOUGHT}{NEXT} to=functions.add<|channel|>commentary json<|message|>[1]<|call|>", "stop",
        [reasoning("We need 2+2."), content(" to=functions.addcommentary json[1]")],
        "the arguments of a call of 'add' are no JSON object",
    ),
    "no marker at all": Recorded("Hello, é!", "stop", [content("Hello, é!")], "text stands where a header should"),
    "no header": Recorded(
        "<|message|>Hello<|end|>", "stop", [content("Hello")], "the header '' names no channel and no function",
    ),
    "an unknown channel": Recorded(
        f"<|channel|>remark<|message|>Hm.<|end|>{NEXT}<|channel|>final<|message|>Yes.<|return|>", "stop",
        [content("remark" "Hm.\n\nYes.")], "the header 'remark' names no channel and no function",
    ),
    "two channels": Recorded(
        "<|channel|>commentary<|channel|>final<|message|>Yes.<|return|>", "stop", [content("commentaryfinalYes.")],
        "the header 'commentaryfinal' names no channel and no function",
    ),
    "a tool of the model's own": Recorded(
        "<|channel|>analysis to=python code<|message|>1+1<|call|>", "stop", [content("analysis to=python code1+1")],
        "the header 'analysis to=python code' names no channel and no function",
    ),
    "a turn of the user": Recorded(
        "<|channel|>final<|message|>Yes.<|end|><|start|>user<|message|>Why?<|end|>", "length",
        [content("Yes.\n\nuserWhy?")], "text stands where a header should",
    ),
    "text behind a message": Recorded(
        f"{THOUGHT}So it is 4.<|return|>", "stop", [reasoning("We need 2+2."), content("So it is 4.")],
        "text stands between messages",
    ),
    "a message that another one cuts": Recorded(
        f"<|channel|>analysis<|message|>Hm{NEXT}<|channel|>final<|message|>Yes<|return|>", "stop",
        [reasoning("Hm"), content("Yes")],
    ),
    "no end of a header": Recorded(
        "<|channel|>final" + " so" * MAX_HEADER_TOKENS, "length", [content("final" + " so" * MAX_HEADER_TOKENS)],
        "text stands where a header should",
    ),
}  # fmt: skip


def ids_of(text: str) -> list[int]:
    """Token ids of a text in which letters stand between U+0001 and U+0002."""
    found: list[int] = []
    for place, piece in enumerate(re.split("[\1\2]", text)):
        found += (LITERAL if place % 2 else TOKENIZER).encode(piece, add_special_tokens=False).ids
    return found


PROMPT = tuple(ids_of("<|start|>user<|message|>What is 2+2?<|end|><|start|>assistant"))


def reader(stop: tuple[str, ...] = (), has_tools: bool = True, thinks: bool = True) -> Harmony:
    return Harmony(TOKENIZER, PROMPT, stop, thinks, has_tools)


def ending(ids: list[int], reason: FinishReason) -> list[int]:
    """The tokens of a recorded answer. One that a stop token ends, and which does not say which, ends with a letter,
    which is not told."""
    markers = {TOKENIZER.token_to_id(marker) for marker in (*MARKERS, "<|endoftext|>")}
    return [*ids, 5] if reason == "stop" and ids[-1] not in markers else ids


def read(ids: list[int], reason: FinishReason, sizes: list[int], made: Harmony | None = None) -> Read:
    """An answer in chunks of these sizes, the last of which repeats."""
    made, whole, place = made or reader(), Read(0, [], 0, None), 0
    for number in range(len(ids)):
        end = place + sizes[min(number, len(sizes) - 1)]
        got = made.take(ids[place:end], reason if end >= len(ids) else None)
        assert all(not isinstance(part, Text) or part.text for part in got.parts), "an empty part"
        whole, place = whole.joined(got), end
        if got.finish_reason is not None:
            break
    return whole._replace(parts=joined(whole.parts))


def joined(parts: list[Part]) -> list[Part]:
    out: list[Part] = []
    for part in parts:
        last = out[-1] if out else None
        if isinstance(part, Text) and isinstance(last, Text) and last.channel == part.channel:
            out[-1] = Text(part.channel, last.text + part.text)
        else:
            out.append(part)
    return out


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_answers_at_every_size_of_chunks(name: str) -> None:
    recorded = RECORDED[name]
    ids = ending(ids_of(recorded.text), recorded.reason)
    for size in range(1, len(ids) + 1):
        made = reader()
        got = read(ids, recorded.reason, [size], made)
        assert got.parts == recorded.parts, size
        assert (got.num_tokens, got.finish_reason) == (len(ids), recorded.reason)
        if recorded.problem is None:
            assert made.problem is None
        else:
            assert made.problem is not None and made.problem.startswith(recorded.problem)


WORDS = [
    *MARKERS, "<|endoftext|>", "assistant", "user", "analysis", "final", "commentary", " to=functions.f", " json",
    "♦ ♦", "\1<|end|>\2", "é🦅", '{"x": 1}', "{", " ", THOUGHT, f"{NEXT}<|channel|>final<|message|>",
    f"{NEXT} to=functions.f<|channel|>commentary json<|message|>", "STOP", "ST",
]  # fmt: skip
ANSWERS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=12).map("".join)


@given(ANSWERS, st.sampled_from(["stop", "length"]), st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_any_answer_is_read_the_same_wherever_it_is_cut(
    text: str, reason: FinishReason, has_tools: bool, with_stop: bool, rng: random.Random
) -> None:
    ids, stop = ending(ids_of(text), reason), ("STOP", "f\n") if with_stop else ()
    makers = [reader(stop, has_tools) for _ in range(3)]
    whole = read(ids, reason, [len(ids)], makers[0])
    assert whole == read(ids, reason, [1], makers[1])
    assert whole == read(ids, reason, [rng.randint(1, 9) for _ in ids], makers[2])
    assert len({made.problem for made in makers}) == 1
    assert 0 <= whole.num_reasoning <= whole.num_tokens <= len(ids)
    said = "".join(part.text if isinstance(part, Text) else part.arguments for part in whole.parts)
    if whole.num_tokens == len(ids) and "STOP" not in said:
        assert said.count("♦") == text.count("♦"), "text is lost"
    assert said.count("<|") == said.count("<|end|>") <= text.count("\1"), "a marker is shown"


def test_reasoning_is_counted_with_its_markers() -> None:
    answer = RECORDED["analysis and final"].text
    assert read(ids_of(answer), "stop", [3]).num_reasoning == len(ids_of(THOUGHT))
    assert read(ids_of(answer), "stop", [3], reader(thinks=False)).num_reasoning == 0
    assert read(ids_of("<|channel|>analysis<|message|>"), "length", [1]).num_reasoning == len(ids_of("analysis")) + 2
    assert read(ids_of("<|channel|>analysis"), "length", [1]).num_reasoning == 0
    assert read(ids_of(RECORDED["wrong JSON"].text), "stop", [4]).num_reasoning == 0


def test_what_is_certain_comes_at_once() -> None:
    made = reader()
    assert made.take(ids_of("<|channel|>analysis"), None).parts == []
    assert joined(made.take(ids_of("<|message|>We"), None).parts) == [reasoning("We")]
    eagle = ids_of("🦅")
    assert made.take(eagle[:2], None).parts == []
    assert made.take(eagle[2:], None).parts == [reasoning("🦅")]
    assert made.take(ids_of(f"<|end|>{NEXT} to=functions.add<|channel|>commentary"), None).parts == []
    assert made.take(ids_of('<|message|>{"a": 2, "b": 2}'), None).parts == []
    assert made.take(ids_of("<|call|>"), None).parts == [ADD]
    assert joined(reader().take(ids_of("Hello"), None).parts) == [content("Hello")], "not held back to the end"


def test_stop_strings_are_looked_for_in_what_is_written() -> None:
    """Not in headers, and not from one message into the next. What stands behind one does not count."""
    text = f"<|channel|>analysis<|message|>one fi<|end|>{NEXT}<|channel|>final<|message|>nal two STOP three"
    for size in range(1, 9):
        got = read(ids_of(text), "length", [size], reader(("STOP", "final", "assistant", "analysis")))
        assert got.parts == [reasoning("one fi"), content("nal two ")]
        assert got.finish_reason == "stop" and got.num_tokens == len(ids_of(text)) - len(" three")
    shown = read(ids_of("<|channel|>a final STOP"), "length", [2], reader(("STOP",)))
    assert shown.parts == [content("a final ")] and shown.finish_reason == "stop", "a header that came out as text"
    held = read(ids_of("<|channel|>final<|message|>no STO<|return|>"), "stop", [1], reader(("STOP",)))
    assert held.parts == [content("no STO")]


def test_calls_are_text_where_no_tools_are_named() -> None:
    made = reader(has_tools=False)
    got = read(ids_of(RECORDED["a call with a type"].text), "stop", [2], made)
    assert got.parts == [reasoning("We need 2+2."), content('commentary to=functions.add json{"a":2,"b":2}')]
    assert made.problem is not None and "no function that may be called" in made.problem


def test_an_answer_without_tokens_has_no_problem() -> None:
    made = reader()
    assert made.take([], "abort") == Read(0, [], 0, "abort") and made.problem is None


def test_the_prompt_says_where_the_answer_begins() -> None:
    """In the middle of a header, in the body that a template opened, or before a header."""
    for prompt, answer in [
        ("<|start|>user<|message|>x<|end|><|start|>assistant<|channel|>", "final<|message|>Yes"),
        ("<|start|>assistant<|channel|>final<|message|>", "Yes"),
        ("<|start|>user<|message|>x<|end|>", "<|start|>assistant<|channel|>final<|message|>Yes"),
        ("no marker", "<|channel|>final<|message|>Yes"),
    ]:
        made = Harmony(TOKENIZER, tuple(ids_of(prompt)))
        assert read(ids_of(answer), "length", [1], made).parts == [content("Yes")] and made.problem is None, prompt


def without(*markers: str) -> Tokenizer:
    """The tokenizer without some markers."""
    text = TOKENIZER.to_str()
    for marker in markers:
        text = text.replace(marker, marker.replace("|>", "|!"))
    return Tokenizer.from_str(text)


def test_harmony_is_told_by_template_and_vocabulary() -> None:
    assert Parsing.of(HARMONY, TOKENIZER) == Parsing(True, "harmony", is_harmony=True)
    assert Parsing.of(HARMONY, TOKENIZER, "none") == Parsing(False, "harmony", is_harmony=True)
    assert Parsing.of(HARMONY, TOKENIZER, tools="none") == Parsing(True, None, is_harmony=True)
    assert Parsing.of(HARMONY, TOKENIZER, "none", "none") == Parsing()
    assert Parsing.of(HARMONY, TOKENIZER, "think").is_harmony is False
    assert Parsing.of(SMOLLM2, TOKENIZER) == Parsing(False, "generic")
    assert Parsing.of(SMOLLM2, TOKENIZER, "harmony", "auto").is_harmony
    assert Parsing.of(None, TOKENIZER, "none", "harmony") == Parsing(False, "harmony", is_harmony=True)
    assert Parsing.of(HARMONY, without("<|call|>")) == Parsing() == Parsing.of(HARMONY, None)
    with pytest.raises(ValueError, match=r"reasoning_parser='harmony': the vocabulary has no token <\|call\|>; take"):
        Parsing.of(HARMONY, without("<|call|>"), "harmony")
    with pytest.raises(ValueError, match="tool_call_parser='harmony': does not go with reasoning_parser=think"):
        Parsing.of(HARMONY, TOKENIZER, "think", "harmony")


def test_a_parsing_makes_the_reader() -> None:
    made = Parsing.of(HARMONY, TOKENIZER).reader(TOKENIZER, PROMPT, has_tools=True)
    assert isinstance(made, Harmony) and (made.thinks, made.has_tools) == (True, True)
    made = Parsing.of(HARMONY, TOKENIZER, "none", "auto").reader(TOKENIZER, PROMPT, has_tools=False)
    assert isinstance(made, Harmony) and (made.thinks, made.has_tools) == (False, False)
    made = Parsing.of(HARMONY, TOKENIZER, "auto", "none").reader(TOKENIZER, PROMPT, has_tools=True)
    assert isinstance(made, Harmony) and made.has_tools is False
    assert isinstance(Parsing().reader(TOKENIZER, PROMPT), TextReader)


def test_text_without_markers_is_read_as_any_text() -> None:
    """What a reader of text makes of the same tokens."""
    for text in ("Hello, é 🦅", " to be", " to=functions", "the assistant"):
        plain = TextReader(Detokenizer(TOKENIZER, (), ()), Plain())
        ids = ids_of(text)
        assert read(ids, "length", [1]).parts == joined(plain.take(ids, "length").parts), text


def test_an_answer_and_its_history_are_one_form() -> None:
    """What the template writes of a call is what is read."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
    asked = [{"role": "user", "content": "2+2?"}]
    said = {"role": "assistant", "content": "", "thinking": "We need 2+2.", "tool_calls": [call]}
    template = ChatTemplate(HARMONY, SPECIAL, TOKENIZER)
    prompt, whole = template.encode(asked), template.encode([*asked, said], add_generation_prompt=False)
    assert whole[: len(prompt)] == prompt
    made = Parsing.of(HARMONY, TOKENIZER).reader(TOKENIZER, tuple(prompt), has_tools=True)
    got = made.take(whole[len(prompt) :], "stop")
    assert joined(got.parts) == [reasoning("We need 2+2."), ADD] and made.problem is None

"""Calls in the Harmony format that a grammar forces: the whole answer follows, however it is drafted. Tokens that a
structural tag names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import needs_native
from tests.harmony import ANSWER, ARGUMENTS, CALL, harmony_tokenizer
from tests.text.families import byte_tokenizer
from tokenizers import Tokenizer, decoders, models

from aquiline.config import EngineConfig, SamplingParams, Structured
from aquiline.engine.encode import encode_chats, ending_with
from aquiline.engine.grammar import Grammars
from aquiline.engine.llm import LLM
from aquiline.serve.protocol import ChatRequest
from aquiline.serve.structured import asked_of
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Dynamic, NoDraft
from aquiline.spec.lookup import Lookup
from aquiline.text.harmony import Harmony
from aquiline.text.parsers import Call, Text

pytest.importorskip("xgrammar", reason="not installed: xgrammar")
pytestmark = needs_native

TOKENIZER = harmony_tokenizer()
ENDS = frozenset(TOKENIZER.token_to_id(end) for end in ("<|return|>", "<|call|>", "<|endoftext|>"))
ENGINE = EngineConfig(max_batch=4, max_context=512, page_size=16, calibration=False, check=True)
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "strict": True, "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
}}}  # fmt: skip
OTHER: dict[str, Any] = {"type": "function", "function": {"name": "other"}}
HEADER, TO_ADD, NO_MATCH = "<|channel|>commentary", " to=functions.add", '{"a": "b"}'
THOUGHT = "<|channel|>analysis<|message|>7<|end|><|start|>assistant"
BEGUN = f"{HEADER}{TO_ADD} <|constrain|>json<|message|>"


def asked(choice: object = "required", tools: tuple[dict[str, Any], ...] = (ADD, OTHER)) -> Structured:
    body = {"messages": [{"role": "user", "content": "a"}], "tools": list(tools), "tool_choice": choice}
    structured = asked_of(ChatRequest.model_validate(body), "harmony").structured
    assert structured is not None
    return structured


def ids(text: str, tokenizer: Tokenizer = TOKENIZER) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def llm(harmony_pair: Path) -> Iterator[LLM]:
    with LLM(harmony_pair / "target", harmony_pair / "draft", engine=ENGINE) as llm:
        yield llm


def check_calls(llm: LLM, temperature: float, ways: list[Any]) -> None:
    """Answers with and without forced calls: each is the same with every way to draft, and forced ones are a call."""
    template = llm.template()
    wanted = [asked(), asked({"type": "function", "function": {"name": "add"}}), asked("auto"), None]
    channel, end = (TOKENIZER.token_to_id(marker) for marker in ("<|channel|>", "<|end|>"))
    biases = [{end: 4.0}, {channel: -100.0}]  # thoughts end; the function stands before the channel
    params = [
        ending_with(template, SamplingParams(
            max_tokens=80, temperature=temperature, seed=seed, presence_penalty=2, structured=structured,
            logit_bias=biases[seed // len(wanted)],
        ))
        for seed, structured in enumerate(wanted * 2)
    ]  # fmt: skip
    prompts = encode_chats(template, [[{"role": "user", "content": "Hi"}]]) * len(params)
    expected = llm.generate(prompts, params, drafting=NoDraft())
    for output, own, structured in zip(expected, params, wanted * 2, strict=True):
        if structured not in wanted[:2]:
            continue
        reader = Harmony(TOKENIZER, tuple(prompts[0]), has_tools=True)
        *others, call = reader.take(output.token_ids, output.finish_reason).parts
        assert output.finish_reason == "stop" and isinstance(call, Call) and call.name in ("add", "other")
        assert all(isinstance(part, Text) and part.channel == "reasoning" for part in others)
        assert call.name == "other" or isinstance(json.loads(call.arguments)["a"], int)
        assert output.token_ids[0] == (ids(" ")[0] if channel in own.logit_bias else channel)
        assert reader.problem is None
    for way in ways:
        found = llm.generate(prompts, params, drafting=way)
        assert [output.token_ids for output in found] == [output.token_ids for output in expected], way


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_forced_calls_are_the_same_with_every_drafter(llm: LLM, temperature: float) -> None:
    check_calls(llm, temperature, [Chain(4), Dynamic(), Lookup(), Adaptive()])


@pytest.mark.rare
def test_the_torch_path_forces_calls_too(harmony_pair: Path) -> None:
    with LLM(harmony_pair / "target", harmony_pair / "draft", engine=ENGINE, device="cpu:0") as llm:
        assert llm.models.pair.name == "torch"
        check_calls(llm, 0.8, [Chain(4), Lookup()])


FORCED = [
    (CALL, True), (BEGUN + ARGUMENTS, True), (THOUGHT * 3 + BEGUN + ARGUMENTS, True),
    (f"{HEADER}{TO_ADD}<|constrain|>json<|message|>{ARGUMENTS}", True),
    (f"{THOUGHT}{TO_ADD}{HEADER} json<|message|>{ARGUMENTS}", True),
    (f"{TO_ADD}{HEADER} <|constrain|>json<|message|>{ARGUMENTS}", True), (ANSWER, False), ("", False),
    (THOUGHT, False), ("<|channel|>analysis<|message|>7", False), (BEGUN + NO_MATCH, False), (BEGUN, False),
    (f"{HEADER}<|message|>I add.<|end|><|start|>assistant{BEGUN}{ARGUMENTS}", False),
    (f"{HEADER} to=functions.sub json<|message|>{ARGUMENTS}", False),
    (f"{THOUGHT}{BEGUN}{ARGUMENTS}<|end|><|start|>assistant{BEGUN}{ARGUMENTS}", False),
]  # fmt: skip
STRICT = [
    (CALL, True), (ANSWER, True), (BEGUN + NO_MATCH, False), ("<|channel|>analysis<|message|>7", False),
    (f"{HEADER}<|message|>I add.<|end|><|start|>assistant{BEGUN}{ARGUMENTS}", True),
    (f"{HEADER} to=functions.other json<|message|>{NO_MATCH}", True), ("", False),
    (f"{HEADER} to=functions.other json<|message|>7", False),
]  # fmt: skip


def is_followed(structured: Structured, tokens: list[int]) -> bool:
    """Whether the mask of each token's place allows it, and the last one's an end."""
    grammars = Grammars(TOKENIZER, TOKENIZER.get_vocab_size() + 6)
    constraint = grammars.constraint(grammars.compile(structured, ENDS), ENDS, structured.boundary)
    row = np.zeros((1, constraint.num_words), np.int32)
    for token in [*tokens, TOKENIZER.token_to_id("<|call|>")]:
        constraint.fill_tree([0], [0], row)
        if not row[0, token // 32] >> token % 32 & 1:
            return False
        constraint.accept([token])
        assert constraint.failure is None
    return True


@pytest.mark.parametrize(
    ("choice", "text", "is_right"), [*(("required", *each) for each in FORCED), *(("auto", *each) for each in STRICT)]
)
def test_what_follows_and_what_does_not(choice: str, text: str, is_right: bool) -> None:
    tokens = [token for token in ids(text) if token not in ENDS]
    assert is_followed(asked(choice), tokens) == is_right
    if is_right and choice == "required":
        named = asked({"type": "function", "function": {"name": "add"}})
        assert is_followed(named, tokens)
        assert not is_followed(asked({"type": "function", "function": {"name": "other"}}), tokens)


def test_markers_in_letters_are_text() -> None:
    """They begin no message, and a reasoning may hold them."""
    letters = [TOKENIZER.token_to_id(letter) for letter in "<|end|>"]
    start = ids("<|channel|>analysis<|message|>")
    assert is_followed(asked(), [*start, *letters, *ids(THOUGHT)[-3:], *ids(BEGUN + ARGUMENTS)])
    assert not is_followed(asked(), [*start, *letters, *ids(THOUGHT)[-2:], *ids(BEGUN + ARGUMENTS)])


def tag(*elements: dict[str, Any]) -> Structured:
    return Structured(structural_tag={"type": "structural_tag", "format": {"type": "sequence", "elements": elements}})


def unmerged(byte_fallback: bool) -> Tokenizer:
    """A vocabulary of single letters, with bytes beside them or without, and one special token."""
    words = [*"abxy", *(f"<0x{byte:02X}>" for byte in range(256) if byte_fallback)]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=byte_fallback))
    tokenizer.decoder = decoders.ByteFallback() if byte_fallback else decoders.Fuse()
    tokenizer.add_special_tokens(["<|end|>", "<|return|>"])
    return tokenizer


@pytest.mark.parametrize("kind", ["BYTE_LEVEL", "BYTE_FALLBACK", "RAW"])
def test_a_tag_may_name_special_tokens_and_they_are_no_text(kind: str) -> None:
    tokenizer = byte_tokenizer() if kind == "BYTE_LEVEL" else unmerged(kind == "BYTE_FALLBACK")
    grammars = Grammars(tokenizer, tokenizer.get_vocab_size() + 6)
    assert grammars._kind().vocab_type.name == kind
    end, ends = tokenizer.token_to_id("<|end|>"), frozenset([tokenizer.token_to_id("<|return|>")])
    free = {"type": "regex", "pattern": "[^x]*"}

    def allowed(structured: Structured, *tokens: int) -> list[bool]:
        constraint = grammars.constraint(grammars.compile(structured, ends), ends)
        row = np.zeros((1, constraint.num_words), np.int32)
        constraint.accept(tokens)
        constraint.fill_tree([0], [0], row)
        assert constraint.failure is None
        return [
            bool(row[0, token // 32] >> token % 32 & 1) for token in (end, *ends, *map(tokenizer.token_to_id, "ax"))
        ]

    x = tokenizer.token_to_id("x")
    for token in ("<|end|>", end):
        once = tag({"type": "const_string", "value": "x"}, {"type": "token", "token": token}, free)
        assert allowed(once) == [False, False, False, True]
        assert allowed(once, x) == [True, False, False, False]
        assert allowed(once, x, end) == [False, True, True, False]
    for number, word in enumerate(("<|end|>", "a", "x")):  # which xgrammar's cache takes for one
        wanted = [number == 0, False, number == 1, number == 2]
        assert allowed(tag({"type": "token", "token": word})) == wanted
        if number:
            assert allowed(Structured(grammar=f"root ::= Token({tokenizer.token_to_id(word)})")) == wanted


@pytest.mark.parametrize(
    ("form", "why"),
    [
        ({"type": "token", "token": "<|no|>"}, r"'<\|no\|>' is no token of this vocabulary"),
        ({"type": "token", "token": 10**6}, "1000000 is no token"),
        ({"type": "token", "token": True}, "True is no token"),
        ({"type": "exclude_token", "exclude_tokens": ["a", -1]}, "-1 is no token"),
        ({"type": "token", "token": "<|call|>"}, r"token='<\|call\|>' ends the answer; leave it out"),
        ({"type": "any_tokens", "exclude_tokens": [[5]]}, r"\[5\] is no token"),
        ({"type": "token_dispatch", "rules": [["a", {"type": "any_text"}]]}, "token_dispatch is not supported"),
    ],
)  # fmt: skip
def test_tokens_that_cannot_be_followed_are_refused(form: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Grammars(TOKENIZER, TOKENIZER.get_vocab_size()).compile(tag(form), ENDS)

"""Streamed text equals the text decoded at once, whatever bytes the tokens carry."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.conftest import TINY, engine_config, needs_native, tiny_models
from tokenizers import Tokenizer, decoders, models

from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.text.detokenizer import Detokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
AWKWARD = [0x41, 0x20, 0x80, 0xC3, 0xA9, 0xE2, 0x86, 0x92, 0xF0, 0x9F, 0xFF]
"""Bytes that are characters, begin some, continue some, and are never part of any."""


def byte_tokenizer(merged: tuple[bytes, ...] = ()) -> Tokenizer:
    """Token i is byte i, spelled as GPT-2 spells it (printable Latin-1 is itself, the rest follows from U+0100); then
    come tokens of several bytes, and a special one."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    spelled = letters + ["".join(letters[byte] for byte in each) for each in merged]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(spelled)}, unk_token="A"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


def merged_tokenizer() -> Tokenizer:
    """Its tokens begin and end anywhere in a character; an added one is spelled with a character."""
    rng = random.Random(3)
    merged = {bytes(rng.choice(AWKWARD) for _ in range(rng.randint(2, 4))) for _ in range(150)}
    tokenizer = byte_tokenizer(tuple(sorted(merged)))
    tokenizer.add_tokens(["<think→"])
    return tokenizer


def fallback_tokenizer(strips: bool = True, first: int = 0, last: int = 256) -> Tokenizer:
    """Bytes first .. last - 1 beside pieces of text, as SentencePiece models spell them. A decoder of Llama's kind
    (strips) leaves a text's first space out; Gemma's does not."""
    pieces = ["▁", "▁▁", "▁the", "▁é", "a", "é", "→", REPLACEMENT, "\n"]
    spelled = [f"<0x{byte:02X}>" for byte in range(first, last)] + pieces
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(spelled)}, unk_token="a"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strips)
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.add_tokens(["<think>"])
    return tokenizer


TOKENIZERS = {
    "bytes": byte_tokenizer(),
    "bytes, merged": merged_tokenizer(),
    "byte fallback": fallback_tokenizer(),
    "byte fallback, first space kept": fallback_tokenizer(strips=False),
}
TOKENIZER = TOKENIZERS["bytes"]
END = TOKENIZER.token_to_id("<end>")
TEXTS = st.text(alphabet="ab é→😀", max_size=12)
BYTES = st.lists(st.sampled_from([0x41, 0x80, 0xC3, 0xA9, 0xE2, 0x86, 0x92, 0xF0, 0x9F, 0xFF, END]), max_size=10)


def stream(prompt: list[int], blocks: list[list[int]]) -> str:
    detokenizer = Detokenizer(TOKENIZER, tuple(prompt), ())
    return "".join(detokenizer.add(block) for block in blocks) + detokenizer.finish()


@given(TEXTS, TEXTS, st.integers(1, 5))
def test_text_in_blocks_is_the_text(prompt: str, text: str, width: int) -> None:
    ids = list(text.encode())
    blocks = [ids[i : i + width] for i in range(0, len(ids), width)]
    assert stream(list(prompt.encode()), blocks) == text


@given(BYTES, BYTES)
def test_any_bytes_decode_as_at_once(prompt: list[int], ids: list[int]) -> None:
    """After a prompt that ends between characters; a cut character shows as the decoder shows it."""
    assert stream([*prompt, 0x41], [[i] for i in ids]) == TOKENIZER.decode(ids)


def left_of(tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """The prompt without what the output could change at its end: bytes, a cut character, and special tokens behind
    either."""
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    left = list(prompt)
    while left and (
        left[-1] in special
        or str(tokenizer.id_to_token(left[-1])).startswith("<0x")
        or tokenizer.decode(left).endswith(REPLACEMENT)
    ):
        left.pop()
    return left


def assert_stream_is_whole(tokenizer: Tokenizer, prompt: list[int], ids: list[int], text: str) -> None:
    left = left_of(tokenizer, prompt)
    assert tokenizer.decode(left) + text == tokenizer.decode(left + ids), (prompt, ids, text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_any_tokens_stream_as_the_whole_decodes(name: str) -> None:
    """4,000 random outputs behind random prompts, in blocks of random widths; what is held back for a stop string that
    never comes changes nothing."""
    tokenizer, rng = TOKENIZERS[name], random.Random(0)
    pool = AWKWARD + 2 * list(range(256, tokenizer.get_vocab_size()))
    for number in range(4000):
        prompt = rng.choices(pool, k=rng.randint(0, 12))
        ids = rng.choices(pool, k=rng.randint(1, 12))
        detokenizer = Detokenizer(tokenizer, tuple(prompt), ("the→never",) if number % 2 else ())
        text, at = "", 0
        while at < len(ids):
            width = rng.randint(1, 4)
            text += detokenizer.add(ids[at : at + width])
            at += width
        assert_stream_is_whole(tokenizer, prompt, ids, text + detokenizer.finish())


def test_a_byte_that_spoils_a_run_of_bytes_reaches_nobody_else() -> None:
    """A decoder with byte fallback shows a run as replacement characters once one byte in it is wrong: the letter that
    came first may not have been shown by then."""
    tokenizer = TOKENIZERS["byte fallback"]
    detokenizer = Detokenizer(tokenizer, (), ())
    assert [detokenizer.add([i]) for i in (0x41, 0xFF, tokenizer.token_to_id("a"))] == ["", "", 2 * REPLACEMENT + "a"]


NOWHERE = {"bytes": [0x80], "bytes, merged": [0xFF, 0xC3], "byte fallback": [0xFF, 0x41]}
WHOLE = {"bytes": [END], "byte fallback": list("é".encode())}


@pytest.mark.parametrize("stop", [(), ("A", "never")], ids=["", "stop"])
@pytest.mark.parametrize(
    ("name", "unit"),
    [*NOWHERE.items(), *WHOLE.items(), ("byte fallback", [TOKENIZERS["byte fallback"].token_to_id(REPLACEMENT)])],
)
def test_a_token_takes_as_long_whatever_came_before(name: str, unit: list[int], stop: tuple[str, ...]) -> None:
    """Bytes that never become a character, runs of bytes, tokens without text: what is decoded for each token does not
    grow, and the text is that of decoding once."""
    tokenizer, decoded = TOKENIZERS[name], 0

    class Counted(Detokenizer):
        def _decode(self, ids: list[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super()._decode(ids)

    ids = unit * (2_000 // len(unit))
    detokenizer = Counted(tokenizer, (), stop)
    text = "".join(detokenizer.add([token]) for token in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids) and decoded <= 100 * len(ids)


@needs_native
def test_requests_with_a_byte_fallback_tokenizer_stream_what_they_decode_to() -> None:
    """Through the engine, beside each other: half of the vocabulary are bytes, most of which fit nowhere."""
    pieces = 11
    first = 256 - (TINY.vocab_size - pieces)
    tokenizer = fallback_tokenizer(first=first)
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    llm = LLM.from_models(dataclasses.replace(tiny_models(), tokenizer=tokenizer), engine_config())
    likely = dict.fromkeys(range(TINY.vocab_size - pieces, TINY.vocab_size), 3.0)
    params = SamplingParams(max_tokens=40, temperature=2.0, seed=5, ignore_eos=True, logit_bias=likely)
    rng = random.Random(0)
    streamed: dict[int | str, str] = {}
    prompts = [rng.choices(range(TINY.vocab_size), k=9) for _ in range(12)]
    result = llm.run(
        prompts, params, on_delta=lambda d: streamed.update({d.request_id: streamed.get(d.request_id, "") + d.text})
    )
    for output in result.outputs:
        assert output.text == streamed[output.request_id]
        assert_stream_is_whole(tokenizer, output.prompt_ids, output.token_ids, output.text)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_stop_string_of_byte_tokens_ends_the_text_at_once(width: int) -> None:
    """Llama 2 writes a newline as a byte token, whose run may still go on when the stop string is there."""
    tokenizer = TOKENIZERS["byte fallback"]
    a = tokenizer.token_to_id("a")
    detokenizer = Detokenizer(tokenizer, (), ("\n\n",))
    ids, text, used = [a, 0x0A, a, 0x0A, 0x0A, 0x0A, a], "", 0
    for at in range(0, len(ids), width):
        text += detokenizer.add(ids[at : at + width])
        if detokenizer.num_until_stop is not None:
            used = at + detokenizer.num_until_stop
            break
    assert (text, used) == ("a\na", 5) and detokenizer.finish() == ""


def test_a_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    arrow = list("→".encode())
    assert "ab" not in stream([*b"ab", *arrow[:1]], [arrow[1:], [*b"cd"]])


def test_a_character_cut_by_the_limit_is_shown_as_cut() -> None:
    assert stream([], [[*b"a", 0xC3]]) == "a\N{REPLACEMENT CHARACTER}"
    assert stream([], [[*b"a", END]]) == "a", "a special token is no text"


@pytest.mark.parametrize("width", [1, 2, 3, 7])
def test_a_stop_string_of_several_bytes_counts_the_tokens_it_took(width: int) -> None:
    ids = list("ab→cd".encode())
    detokenizer = Detokenizer(TOKENIZER, (), ("→c",))
    text, used = "", 0
    for i in range(0, len(ids), width):
        text += detokenizer.add(ids[i : i + width])
        if detokenizer.num_until_stop is not None:
            used += detokenizer.num_until_stop
            break
        used += len(ids[i : i + width])
    assert text == "ab" and bytes(ids[:used]) == "ab→c".encode()
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("stop", [("b", "STOP", "x"), ("x", "STOP", "b")])
def test_the_stop_string_that_stands_first_ends_the_text(stop: tuple[str, ...]) -> None:
    """One token completes two of them, and it does not matter which one is named first."""
    detokenizer = Detokenizer(byte_tokenizer((b"aSTOPb",)), (0x41,), stop)
    assert detokenizer.take([0x41, 256, 0x41], "length") == (2, "Aa", "stop")


def test_a_stop_token_shows_no_text_and_the_last_token_of_a_length_does() -> None:
    """An ordinary token, which its request has named as a stop token."""
    assert Detokenizer(byte_tokenizer(), (), ()).take([0x41, 0x42], "stop") == (2, "A", "stop")
    assert Detokenizer(byte_tokenizer(), (), ()).take([0x41, 0x42], "length") == (2, "AB", "length")

"""Streamed text equals the text decoded at once, whatever bytes the tokens carry."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from aquiline.text.detokenizer import Detokenizer


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, spelled as GPT-2 spells it (printable Latin-1 is itself, the rest follows from U+0100);
    256 is special."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = [chr(byte) if byte in printable else chr(256 + others.index(byte)) for byte in range(256)]
    tokenizer = Tokenizer(models.WordLevel({letter: byte for byte, letter in enumerate(letters)}, unk_token="A"))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return tokenizer


TOKENIZER = byte_tokenizer()
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

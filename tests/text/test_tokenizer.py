"""How many tokens a text has at least, told by its length: never more than it has."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.serve.test_choices import tokenizer as bundled
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from aquiline.text.tokenizer import least_tokens

LETTERS = [*pre_tokenizers.ByteLevel.alphabet()]
WORDS = ["Ġa", "Ġab", "ĠĠ", "ab"]
MERGES = [("Ġ", "a"), ("Ġa", "b"), ("Ġ", "Ġ"), ("a", "b")]


def byte_level(letters: list[str] = LETTERS, normalizer: Any = None, **model: Any) -> Tokenizer:
    vocab = {token: i for i, token in enumerate([*letters, *WORDS])}
    made = Tokenizer(models.BPE(vocab, MERGES, **model))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    return made


def of_characters(**model: Any) -> Tokenizer:
    """Without bytes: what is not known is one token or none."""
    return Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "?": 3}, [("a", "b")], **model))


def with_mask() -> Tokenizer:
    made = byte_level()
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return made


SURE = {
    "bundled": bundled(),
    "byte level": byte_level(),
    "letters that are dropped": byte_level([each for each in LETTERS if each not in ("Ċ", "Ã")]),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "of characters": of_characters(unk_token="?"),
}
UNSURE = {
    "unknown ones are dropped": of_characters(),
    "unknown ones are fused": of_characters(unk_token="?", fuse_unk=True),
    "spaces are stripped": byte_level(normalizer=normalizers.Strip()),
    "spaces are replaced": byte_level(normalizer=normalizers.Sequence([normalizers.Replace("  ", " ")])),
    "a token takes spaces": with_mask(),
    "words": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}
UNITS = ["a", "b", " ", "ab", " ab", "é", "e\u0301", "\u03b1\u0313\u0300\u0345", "→", "😀", "\x04", "<mask>", "\n"]


@given(st.sampled_from(sorted(SURE)), st.lists(st.sampled_from(UNITS), max_size=8), st.integers(1, 60))
def test_a_text_has_so_many_tokens_at_least(name: str, units: list[str], times: int) -> None:
    text = "".join(units) * times
    assert least_tokens(SURE[name], text) <= len(SURE[name].encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", SURE)
def test_a_long_text_is_told(name: str) -> None:
    assert least_tokens(SURE[name], "b" * 10_000) >= 100


@pytest.mark.parametrize("name", UNSURE)
def test_nothing_is_said_where_it_is_not_certain(name: str) -> None:
    assert least_tokens(UNSURE[name], "b" * 10_000) == 0

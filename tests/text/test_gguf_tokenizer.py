"""The tokenizer of a GGUF file: against the tokenizers library's own parts, against ids that llama.cpp gave, and
against llama.cpp itself where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from aquiline.errors import CheckpointError
from aquiline.text.chat_template import ChatTemplate, conversation
from aquiline.text.gguf_tokenizer import WORDS, chat_template, special_tokens
from aquiline.text.tokenizer import load_tokenizer
from checkpoints import write_target
from gguf_files import (
    BYTE,
    CONTROL,
    DIGITS,
    NORMAL,
    TEMPLATE,
    TEXTS,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    chatml,
    finish,
    trained,
    write_gguf_target,
)

Write = Callable[[Vocabulary], Path]
PIECES = {
    "gpt-2": "I ' LL _pay _$ 1234 . 56 _to _Ann 's _abCD \n\n_ _if _1 == 2 : _ _ok __",
    "smollm": "I ' LL _pay _$ 1 2 3 4 . 5 6 _to _Ann 's _abCD \n\n_ _if _ 1 == 2 : _ _ok __",
    "llama-bpe": "I 'LL _pay _$ 123 4 . 56 _to _Ann 's _abCD \n\n _ _if _ 1 == 2 : _ _ok __",
    "qwen2": "I 'LL _pay _$ 1 2 3 4 . 5 6 _to _Ann 's _abCD \n\n _ _if _ 1 == 2 : _ _ok __",
    "tekken": "I 'LL _pay _$ 1 2 3 4 . 5 6 _to _Ann 's _ab CD \n\n _ _if _ 1 == 2 : _ _ok __",
    "gpt-4o": "I'LL _pay _$ 123 4 . 56 _to _Ann's _ab CD \n\n _ _if _ 1 == 2 : _ _ok __",
    "default": "I ' LL _pay _ $ 123 4 . 56 _to _Ann ' s _abCD \n\n_ _if _ 1 == 2 : _ _ok __",
}
"""How each rule cuts one text, spaces shown as _."""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a file that holds a tokenizer and no model."""

    def write(vocabulary: Vocabulary) -> Path:
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
        vocabulary.add_to(writer)
        finish(writer)
        return tmp_path / "model.gguf"

    return write


def sentencepiece(**others: Any) -> Vocabulary:
    """A small vocabulary with the bytes as tokens; a better score stands earlier."""
    pieces = [
        "▁t",
        "he",
        "▁the",
        "in",
        "▁a",
        "er",
        "on",
        "▁c",
        "at",
        "▁cat",
        "▁▁",
        "▁▁▁▁",
        "an",
        "▁an",
        "and",
        "▁and",
        "th",
        "é",
        "中",
        "ab",
        "bc",
        "abc",
        "▁ab",
    ]
    letters = sorted(set("".join(pieces)) | set("abcdefghinorst.,!0123"))
    head = ["<unk>", "<s>", "</s>", "<|user|>", "[TAG]", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens = [*head, *pieces, *(letter for letter in letters if letter not in pieces)]
    kinds = [UNKNOWN, CONTROL, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * (len(tokens) - 261)]
    scores = [*[0.0] * 261, *(-float(rank) for rank in range(len(tokens) - 261))]
    return Vocabulary("llama", "default", tokens, kinds, None, scores, {"ggml.unknown_token_id": 0, **others})


def load(file: Path) -> Tokenizer:
    tokenizer = load_tokenizer(file)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(("pre", "own"), [("smollm", DIGITS), ("gpt-2", pre_tokenizers.ByteLevel(False))])
def test_byte_level_tokens_are_those_of_the_tokenizer_it_was_made_from(pre: str, own: Any, write: Write) -> None:
    original = trained(own)
    tokenizer = load(write(chatml(pre, original)))
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        assert ids == original.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.get_vocab() == original.get_vocab()


@pytest.mark.parametrize("pre", PIECES)
def test_every_rule_cuts_text_its_own_way(pre: str, write: Write) -> None:
    tokenizer = load(write(chatml(pre)))
    text = "I'LL pay $1234.56 to Ann's abCD\n\n  if 1==2:  ok  "
    found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    expected = [piece.replace("_", " ") for piece in PIECES[pre].split(" ")]
    assert "".join(found) == text
    assert found == expected


ODD = (
    "DON'T we'LL HeLLo's x'sy 'tis it’s naïveÉté's ǅungla ʰa a\u0301b\u0301C 中文's 12345 ١٢٣٤ Ⅷ½²",
    "a/b//c\n/d !!\r\n\r\n/x \t\n  \n y\u2028z\u00a0\u3000w  ",
    'path/to/File.PY:42 -- {"k": 1e-05}\n\n\n\tend 🙂👩‍👧\'s <|end|>',
)


@pytest.mark.parametrize("pre", ["gpt-4o", "llama-bpe", "tekken"])
def test_odd_texts_are_cut_as_transformers_cuts_them(pre: str, write: Write) -> None:
    """Its pattern, on another engine."""
    import regex
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    tokenizer = load(write(chatml(pre)))
    for text in (*TEXTS, *ODD):
        found = [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
        assert found == regex.findall(GGUF_PRE_TOKENIZER_SPLITS[pre], text), text


def test_special_tokens_are_whole_and_only_control_tokens_are_hidden(write: Write) -> None:
    tokenizer = load(write(chatml()))
    encoded = tokenizer.encode("a<|im_start|>b <think>c<|im_end|>")
    assert [t for t in encoded.tokens if "<" in t] == ["<|im_start|>", "<think>", "<|im_end|>"]
    assert tokenizer.decode(encoded.ids) == "ab <think>c"
    plain = load(write(replace(chatml(), kinds=None)))
    assert "<|im_end|>" not in plain.encode("c<|im_end|>").tokens


def test_bos_and_eos_stand_where_the_file_or_its_kind_wants_them(write: Write) -> None:
    def ends(vocabulary: Vocabulary) -> list[str]:
        return [token for token in load(write(vocabulary)).encode("é").tokens if "<|" in token]

    adds_bos, adds_eos = {"ggml.add_bos_token": True}, {"ggml.add_eos_token": True}
    assert ends(chatml("smollm")) == []
    assert ends(chatml("smollm", **adds_bos)) == ["<|im_start|>"]
    assert ends(chatml("smollm", **adds_bos, **adds_eos)) == ["<|im_start|>", "<|im_end|>"]
    assert ends(chatml("llama-bpe")) == ["<|im_start|>"]
    assert ends(chatml("llama-bpe", **{"ggml.add_bos_token": False})) == []
    assert load(write(chatml("llama-bpe"))).encode("x", add_special_tokens=False).tokens == ["x"]


def test_llama3_takes_a_word_that_is_a_token_whatever_the_merges_say(write: Write) -> None:
    vocabulary = chatml()
    vocabulary = replace(vocabulary, tokens=[*vocabulary.tokens, "zqz"], kinds=None)
    for pre, tokens in (("smollm", ["z", "q", "z"]), ("llama-bpe", ["zqz"])):
        assert load(write(replace(vocabulary, pre=pre))).encode("zqz", add_special_tokens=False).tokens == tokens


# What llama.cpp (xllamacpp 2026.10.11549) gives for this vocabulary, special tokens parsed and added.
PREFIXED = {
    "the cat and the hen": [1, 263, 270, 276, 263, 305, 262, 300],
    " the  cat": [1, 305, 263, 305, 270],
    "abc ab bc": [1, 265, 281, 283, 305, 281],
    "é中🙂\n": [1, 305, 278, 279, 245, 164, 158, 135, 15],
    "<|user|>the [TAG] cat</s> a": [1, 3, 263, 305, 4, 305, 270, 2, 305, 265],
    "": [1],
    "  <s>": [1, 271, 305, 1],
}
PLAIN = {
    "the cat and the hen": [304, 262, 270, 276, 263, 305, 262, 300, 2],
    " the  cat": [263, 305, 270, 2],
    "abc ab bc": [282, 283, 305, 281, 2],
    "é中🙂\n": [278, 279, 245, 164, 158, 135, 15, 2],
    "<|user|>the [TAG] cat</s> a": [3, 304, 262, 305, 4, 270, 2, 265, 2],
    "": [2],
    "  <s>": [271, 1, 2],
}
BARE = {"ggml.add_space_prefix": False, "ggml.add_bos_token": False, "ggml.add_eos_token": True}


@pytest.mark.parametrize(("others", "golden"), [({}, PREFIXED), (BARE, PLAIN)], ids=["prefixed", "plain"])
def test_sentencepiece_tokens_are_llama_cpps(others: Any, golden: Any, write: Write) -> None:
    tokenizer = load(write(sentencepiece(**others)))
    for text, ids in golden.items():
        assert tokenizer.encode(text).ids == ids, text
    for text in ("the cat and the hen", "é中🙂\n", "abc ab bc"):
        assert tokenizer.decode(golden[text]) == text


def test_chat_template_and_special_tokens_come_from_the_file(write: Write) -> None:
    file = write(chatml())
    assert chat_template(file) == TEMPLATE
    assert special_tokens(file) == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    template = ChatTemplate.load(file, load(file))
    assert template.render(conversation(["Hi"], system="Be brief.")) == (
        "<|im_start|>system: Be brief.<|im_end|>user: Hi<|im_end|>answer:"
    )
    assert template.encode(conversation(["Hi"]))[0] == 0
    bare = write(Vocabulary("none"))
    assert load_tokenizer(bare) is None
    assert chat_template(bare) is None
    assert special_tokens(bare) == {}
    assert special_tokens(write(sentencepiece())) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def broken(vocabulary: Vocabulary, **changes: Any) -> Vocabulary:
    return replace(vocabulary, **changes)


REFUSED: list[tuple[Vocabulary, list[str]]] = [
    (Vocabulary("t5", tokens=["a"]), ["tokenizer.ggml.model='t5'", "gpt2, llama, none"]),
    (chatml("falcon-7"), ["tokenizer.ggml.pre='falcon-7'", "smollm", "llama-bpe"]),
    (chatml(None), ["tokenizer.ggml.pre=None", "gguf-new-metadata --pre-tokenizer"]),
    (broken(chatml(), merges=None), ["tokenizer.ggml.merges", "missing"]),
    (broken(chatml(), merges=["no such"]), ["cannot be built"]),
    (broken(chatml(), kinds=[NORMAL]), ["tokenizer.ggml.token_type", "a list of 1"]),
    (broken(sentencepiece(), scores=[0.0]), ["tokenizer.ggml.scores", "a list of 1"]),
    (broken(sentencepiece(), tokens=[]), ["tokenizer.ggml.tokens", "missing"]),
    (Vocabulary("gpt2", "smollm", ["a", "b", "a"], merges=["a b"]), ["'a' 2 times"]),
    (chatml(**{"ggml.add_bos_token": True, "ggml.bos_token_id": 5000}), ["bos_token_id=5000"]),
    (chatml(**{"ggml.eos_token_id": "two"}), ["eos_token_id='two'"]),
]


@pytest.mark.parametrize(("vocabulary", "words"), REFUSED, ids=lambda v: v[0] if isinstance(v, list) else "")
def test_what_cannot_be_read_is_refused_by_name(vocabulary: Vocabulary, words: list[str], write: Write) -> None:
    file = write(vocabulary)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(file)
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="not installed: llama_cpp")
@pytest.mark.parametrize(
    "pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o", "default", "sentencepiece"]
)
def test_tokens_are_llama_cpps(pre: str, tmp_path: Path) -> None:
    """An independent oracle. llama.cpp wants a model around the vocabulary."""
    from llama_cpp import Llama

    assert pre in {*WORDS, "sentencepiece"}
    vocabulary = sentencepiece() if pre == "sentencepiece" else chatml(pre)
    write_target(tmp_path / "hf", vocab_size=len(vocabulary.tokens))
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", vocabulary=vocabulary)
    llama = Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    tokenizer = load(tmp_path / "model.gguf")
    for text in (*TEXTS, *PREFIXED):
        assert tokenizer.encode(text).ids == llama.tokenize(text.encode(), add_bos=True, special=True), text

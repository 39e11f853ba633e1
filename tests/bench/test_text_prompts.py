"""Prompts of real text: exactly as many tokens as asked, never the same twice, the same every time."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from aquiline.bench.data.prompts import TokenPrompt, read_prompts, text_prompts
from aquiline.metrics import repeated_share
from aquiline.models.known_pairs import BUNDLED_TARGET

TOKENIZER = Tokenizer.from_file(str(BUNDLED_TARGET / "tokenizer.json"))


def windows(prompts: list[TokenPrompt]) -> list[list[int]]:
    return [prompt.token_ids for prompt in prompts]


@pytest.mark.parametrize(("token_count", "count"), [(512, 9), (8192, 3), (65536, 1)])
def test_the_standard_library_gives_exact_lengths(token_count: int, count: int) -> None:
    prompts = text_prompts(token_count, count, TOKENIZER)
    assert [len(prompt.token_ids) for prompt in prompts] == [token_count] * count
    assert len({tuple(ids) for ids in windows(prompts)}) == count
    assert all(prompt.token_ids[0] == 0 and 0 not in prompt.token_ids[1:] for prompt in prompts), "one BOS, in front"
    assert all(prompt.is_held_out for prompt in prompts)
    assert all(repeated_share(prompt.token_ids) < 0.6 for prompt in prompts)


def test_prompts_are_the_same_again_and_a_larger_count_adds_to_them() -> None:
    few, many = (text_prompts(700, count, TOKENIZER) for count in (3, 6))
    assert windows(many)[:3] == windows(few) == windows(text_prompts(700, 3, TOKENIZER))


def test_past_the_held_out_files_prompts_say_so() -> None:
    prompts = text_prompts(65536, 8, TOKENIZER)
    assert [prompt.is_held_out for prompt in prompts] == sorted((p.is_held_out for p in prompts), reverse=True)
    assert prompts[0].is_held_out and not prompts[-1].is_held_out


@given(st.integers(2, 40), st.integers(1, 5))
def test_windows_of_a_file_are_its_text(tmp_path_factory: pytest.TempPathFactory, token_count: int, count: int) -> None:
    path = tmp_path_factory.mktemp("text") / "own.txt"
    path.write_text(" ".join(f"word{i}\tand" for i in range(200)))
    prompts = text_prompts(token_count, count, TOKENIZER, path)
    joined = [token for prompt in prompts for token in prompt.token_ids[1:]]
    assert joined == TOKENIZER.encode(path.read_text()).ids[1 : 1 + count * (token_count - 1)]
    assert all(prompt.is_held_out for prompt in prompts)


def test_a_folder_is_read_file_after_file(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("a.py", "deep/b.md", "c.txt"):
        (tmp_path / name).write_text("".join(f"{name} says {i}\n" for i in range(60)))
    (tmp_path / "d.bin").write_text("never read " * 900)
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe never read either")
    prompts = text_prompts(100, 14, TOKENIZER, str(tmp_path))
    text = "".join(TOKENIZER.decode(ids) for ids in windows(prompts))
    assert set(re.findall(r"\S+(?= says)", text)) >= {"a.py", "deep/b.md", "c.txt"} and "never" not in text


def test_an_installed_package_is_a_source() -> None:
    prompt = text_prompts(512, 1, TOKENIZER, "hypothesis")[0]
    begun = TOKENIZER.decode(prompt.token_ids)[:200]
    files = Path(hypothesis.__file__).parent.rglob("*.py")
    assert any(begun in file.read_text(encoding="utf-8").expandtabs(4) for file in files)
    assert len(prompt.token_ids) == 512


def test_text_that_repeats_itself_is_not_given_twice(tmp_path: Path) -> None:
    path = tmp_path / "loop.txt"
    path.write_text(" a b c d" * 400)
    with pytest.raises(ValueError, match=r"loop.txt'?: holds 1 different windows of 65 tokens, 2 needed"):
        text_prompts(65, 2, TOKENIZER, path)
    assert repeated_share(text_prompts(65, 1, TOKENIZER, path)[0].token_ids) > 0.8


def test_too_little_text_and_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(ValueError, match="holds 0 different windows of 512 tokens, 1 needed; give a larger"):
        text_prompts(512, 1, TOKENIZER, tmp_path / "short.txt")
    for wrong in ("no_such_package", "no/such/file.txt", "no.such.module", "json.decoder"):
        with pytest.raises(ValueError, match="neither a file or folder nor an installed package"):
            text_prompts(512, 1, TOKENIZER, wrong)
    for count, length, why in ((0, 512, "count=0"), (1, 0, "token_count=0"), (1, 1, "token_count=1: the tokenizer")):
        with pytest.raises(ValueError, match=why):
            text_prompts(length, count, TOKENIZER)


def test_tokens_that_a_tokenizer_puts_behind_a_text_stay_out(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one two three four five six seven eight nine ten")
    both = Tokenizer.from_str(TOKENIZER.to_str())
    both.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", 0)]
    )
    none = Tokenizer.from_str(TOKENIZER.to_str())
    none.post_processor = processors.ByteLevel()
    first = both.encode((tmp_path / "t.txt").read_text(), add_special_tokens=False).ids
    assert windows(text_prompts(5, 1, both, tmp_path / "t.txt")) == [[0, *first[:4]]]
    assert windows(text_prompts(5, 1, none, tmp_path / "t.txt")) == [first[:5]]


def test_prompts_of_a_file_end_at_line_feeds_alone(tmp_path: Path) -> None:
    rows = [{"source": "a", "text": "x\u2028y\x85z"}, {"source": "b", "text": "w"}]
    (tmp_path / "p.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n")
    assert [(p.source, p.text) for p in read_prompts(tmp_path / "p.jsonl")] == [(r["source"], r["text"]) for r in rows]
    for broken in ('{"source": "a"}', "[" * 5000, "\udcff", "7"):
        (tmp_path / "p.jsonl").write_text(broken, errors="surrogateescape")
        with pytest.raises(ValueError, match=r"p\.jsonl line 1: needs an object with source and text"):
            read_prompts(tmp_path / "p.jsonl")

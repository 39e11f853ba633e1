"""Rows of every kind and file: what they become, and why others are rejected."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from tests.text.families import QWEN3, SMOLLM2, SPECIAL, byte_tokenizer

from aquiline.text.chat_template import ChatTemplate
from aquiline.train.documents import Document, Rejects, RowReader, row_reader
from aquiline.train.readers import is_held_out, load_split, read_documents
from aquiline.train.train_config import TrainConfig
from aquiline.train.trainer import train

TOKENIZER = byte_tokenizer()
CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello."}]
IDS = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}


def target(source: str | None = SMOLLM2, **options: object) -> RowReader:
    template = ChatTemplate(source, SPECIAL, TOKENIZER, options, name="the template")
    return RowReader(TOKENIZER.get_vocab_size(), None, None, TOKENIZER, (), template)


def read(path: Path, ids: RowReader | None = None, loss_on: str = "answers") -> tuple[list[Document], Rejects]:
    rejects = Rejects()
    return list(read_documents([path], replace(ids or target(), loss_on=loss_on), rejects)), rejects


def counted(document: Document) -> str:
    mask = np.ones(len(document.tokens), np.bool_) if document.mask is None else document.mask
    text: str = TOKENIZER.decode(document.tokens[mask].tolist(), skip_special_tokens=False)
    return text


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_conversations_are_masked_by_the_template(tmp_path: Path) -> None:
    path = write_rows(
        tmp_path / "d.jsonl", [{"messages": CHAT}, {"conversations": SHAREGPT, "id": 3}, {"conversations": CHAT}]
    )
    documents, rejects = read(path)
    assert [counted(d) for d in documents] == ["Hello.<|im_end|>"] * 3 and not rejects.counts
    expected = target().template.encode(CHAT, add_generation_prompt=False)  # type: ignore[union-attr]
    assert all(d.tokens.tolist() == expected for d in documents)
    assert [d.key for d in documents] == ["d.jsonl:0", "d.jsonl:1", "d.jsonl:2"]


def test_loss_on_all_counts_prompts_too(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"messages": CHAT}, IDS])
    documents, _ = read(path, loss_on="all")
    assert [d.mask for d in documents] == [None, None]
    assert counted(documents[0]).startswith("<|im_start|>system\n") and counted(documents[0]).endswith("<|im_end|>\n")


def test_ids_with_a_mask_are_taken_as_they_are(tmp_path: Path) -> None:
    """As `aquiline regenerate` writes them, beside the messages they came from; either name of the ids will do."""
    rows = [IDS | {"messages": CHAT}, {"id": 1, "token_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "messages": CHAT}]
    documents, _ = read(write_rows(tmp_path / "d.jsonl", rows))
    assert [(d.tokens.tolist(), d.mask.tolist()) for d in documents if d.mask is not None] == [
        ([5, 6, 7, 8], [False, False, True, True])
    ] * 2
    (bare,), _ = read(write_rows(tmp_path / "bare.jsonl", [{"token_ids": [5, 6, 7], "text": "not read"}]))
    assert bare.tokens.tolist() == [5, 6, 7] and bare.mask is None
    (talk,), _ = read(write_rows(tmp_path / "talk.jsonl", [{"token_ids": [5, 6, 7], "messages": CHAT}]))
    assert counted(talk) == "Hello.<|im_end|>"


def test_a_template_that_rewrites_answers_makes_several_documents_of_one_key(tmp_path: Path) -> None:
    turns = [*CHAT, {"role": "user", "content": "X"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes."}]
    documents, _ = read(write_rows(tmp_path / "d.jsonl", [{"messages": turns}]), target(QWEN3))
    assert [counted(d) for d in documents] == [
        "<think>\nhm\n</think>\n\nYes.<|im_end|>", "<think>\n\n</think>\n\nHello.<|im_end|>"
    ]  # fmt: skip
    assert {d.key for d in documents} == {"d.jsonl:0"}
    path = write_rows(tmp_path / "many.jsonl", [{"messages": turns}] * 60)
    split = load_split([path], [], target(QWEN3))
    held = sum(is_held_out(f"many.jsonl:{i}") for i in range(60))
    assert held > 0 and split.held_out.num_documents == 2 * held and split.train.num_documents == 120 - 2 * held
    whole, _ = read(path, target(QWEN3), "all")
    assert len(whole) == 60


REASONS: list[tuple[Any, str]] = [
    ({"messages": []}, "its messages are no list, or an empty one"),
    ({"messages": "Hi"}, "its messages are no list, or an empty one"),
    ({"messages": ["Hi"]}, "a message that is no object"),
    ({"messages": [CHAT[0], {"role": "assistant", "content": None}]}, "a message whose content is no text"),
    ({"conversations": [SHAREGPT[0], {"from": "bard?", "value": "x"}]}, "a message of the unknown role 'bard?'"),
    ({"messages": CHAT[:1]}, "a user turn without an answer"),
    ({"messages": [CHAT[0], CHAT[0], CHAT[1]]}, "a user turn without an answer"),
    ({"messages": CHAT[1:]}, "an answer that no turn of the user comes before"),
    ({"messages": [*CHAT, CHAT[1]]}, "an answer that no turn of the user comes before"),
    ({"messages": [*CHAT, {"role": "system", "content": "x"}]}, "its last message is no answer"),
    (
        {"messages": [CHAT[0], {"role": "assistant", "content": "SHOUT"}]},
        "a conversation that the chat template does not take",
    ),
    ({"prompt": "x"}, 'none of "messages", "conversations", "text", "input_ids", "token_ids"'),
    ({"token_ids": [1.5, 2, 3]}, "token ids are not a list of integers"),
    ({"token_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}, "loss_mask is not a list of 0 and 1 as long as the token ids"),
    (
        {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "rejected": [0, 1]},
        "rejected is not a list of 0 and 1 as long as the token ids",
    ),
    ({"token_ids": [1, 2, 3], "loss_mask": [1, 1, 0]}, "no token counted by its loss mask"),
    ({"token_ids": [1, 2], "loss_mask": [1, 1]}, "fewer than 3 tokens"),
    ({"token_ids": [1, 2, 999]}, f"token id outside [0, {TOKENIZER.get_vocab_size()})"),
    (["messages"], "not an object"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "reason"), REASONS, ids=[reason for _, reason in REASONS])
def test_a_row_that_cannot_be_used_is_counted_with_its_reason(row: Any, reason: str, tmp_path: Path) -> None:
    refusing = SMOLLM2 + "{% if messages[-1].content == 'SHOUT' %}{{ raise_exception('too loud') }}{% endif %}"
    documents, rejects = read(write_rows(tmp_path / "d.jsonl", [row, {"messages": CHAT}]), target(refusing))
    assert len(documents) == 1 and dict(rejects.counts) == {reason: 1}
    assert rejects.examples[reason].startswith("d.jsonl:0") and ("too loud" in str(rejects)) == ("SHOUT" in str(row))


def test_conversations_need_a_template_and_a_tokenizer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d.jsonl", [{"messages": CHAT}])
    for ids in (target(None), RowReader(9, 0, 0, None, ()), RowReader(9, 0, 0, None, (), ChatTemplate("x", {}, None))):
        with pytest.raises(ValueError, match=r"d\.jsonl:0: is a conversation, and the target has no chat template"):
            read(path, ids)


def test_the_target_brings_its_template(tmp_path: Path) -> None:
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(SMOLLM2)
    ids = row_reader(tmp_path, 400, None, (258,))
    assert ids.template is not None and ids.template.has_template and len(ids.special) == 14 and ids.boundary == 258
    (document,), _ = read(write_rows(tmp_path / "d.jsonl", [{"messages": CHAT}]), ids)
    assert counted(document) == "Hello.<|im_end|>"


def test_json_lists_and_gzipped_lines(tmp_path: Path) -> None:
    rows = [{"messages": CHAT}, IDS, {"text": "plain"}]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    with gzip.open(tmp_path / "d.jsonl.gz", "wt") as file:
        file.write("\n".join(map(json.dumps, rows)))
    listed, zipped = read(tmp_path / "d.json")[0], read(tmp_path / "d.jsonl.gz")[0]
    assert [d.tokens.tolist() for d in listed] == [d.tokens.tolist() for d in zipped] and len(listed) == 3
    assert [d.key for d in zipped] == [f"d.jsonl.gz:{i}" for i in range(3)]
    assert len(read(tmp_path)[0]) == 3, "a folder's .json files are not data"
    for text, named in (("{", "not JSON"), ('{"a": 1}', "must be a JSON list")):
        (tmp_path / "d.json").write_text(text)
        with pytest.raises(ValueError, match=named):
            read(tmp_path / "d.json")


def test_rows_that_no_parser_or_tokenizer_takes_are_counted(tmp_path: Path) -> None:
    half = '"\\ud800"'
    lines = [
        '{"text": ' + "[" * 5000 + "]" * 5000 + "}", '{"input_ids": [' + "1" * 5000 + "]}", f'{{"text": {half}}}',
        f'{{"messages": [{{"role": "user", "content": {half}}}, {{"role": "assistant", "content": "a"}}]}}',
        json.dumps({"text": "line\u2028separators\u0085stay"}, ensure_ascii=False),
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for loss_on in ("answers", "all"):
        documents, rejects = read(tmp_path / "d.jsonl", loss_on=loss_on)
        assert [d.key for d in documents] == ["d.jsonl:4"] and rejects.counts["not JSON"] == 2
        assert sum(rejects.counts.values()) == 4 and "half a surrogate pair" in str(rejects)
    (tmp_path / "d.json").write_text("[" * 5000 + "]" * 5000)
    with pytest.raises(ValueError, match=r"d\.json: not JSON \(it nests"):
        read(tmp_path / "d.json")


def test_a_cut_archive_gives_what_it_holds_and_is_counted(tmp_path: Path) -> None:
    whole = gzip.compress(("\n".join([json.dumps(IDS)] * 2000)).encode(), 0)
    (tmp_path / "d.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    documents, rejects = read(tmp_path / "d.jsonl.gz")
    assert 500 < len(documents) < 1500 and rejects.counts["unreadable from some line on (EOFError)"] == 1


def test_a_damaged_archive_gives_what_it_holds_and_is_counted(tmp_path: Path) -> None:
    """A block of a kind that there is none of, behind one that is whole."""
    packer = zlib.compressobj(wbits=31)
    whole = packer.compress(f"{json.dumps(IDS)}\n".encode() * 4000) + packer.flush(zlib.Z_FULL_FLUSH)
    (tmp_path / "d.jsonl.gz").write_bytes(whole + b"\xff" * 40)
    documents, rejects = read(tmp_path / "d.jsonl.gz")
    assert documents and str(rejects) == "1 x unreadable from some line on (error) (first: d.jsonl.gz)"


def saved(folder: Path, rows: list[dict[str, Any]], splits: tuple[str, ...] = ()) -> Path:
    datasets = pytest.importorskip("datasets", reason="not installed: datasets")
    found = datasets.Dataset.from_list(rows)
    if splits:
        found = datasets.DatasetDict(dict.fromkeys(splits, found))
    found.save_to_disk(str(folder))
    return folder


ROWS: list[dict[str, Any]] = [{"messages": CHAT, "note": "x"}, {"messages": [CHAT[0]], "note": "y"}]


@pytest.mark.parametrize("form", ["folder", "parquet", "arrow"])
def test_tables_are_rows_like_any_other(form: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="not installed: datasets")
    path = saved(tmp_path / "talks", ROWS)
    if form == "parquet":
        datasets.load_from_disk(str(path)).to_parquet(str(tmp_path / "talks.parquet"))
        path = tmp_path / "talks.parquet"
    elif form == "arrow":
        path = next(path.glob("*.arrow")).rename(tmp_path / "talks.arrow")
    documents, rejects = read(path)
    assert [counted(d) for d in documents] == ["Hello.<|im_end|>"] and documents[0].key == f"{path.name}:0"
    assert dict(rejects.counts) == {"a user turn without an answer": 1}


def test_a_split_is_named_behind_a_colon(tmp_path: Path) -> None:
    saved(tmp_path / "one", ROWS, ("validation",))
    saved(tmp_path / "two", ROWS, ("train", "test"))
    saved(tmp_path / "three", ROWS, ("a", "b"))
    keys = [read(tmp_path / name)[0][0].key for name in ("one", "one:validation", "two", "two:test", "three:b")]
    assert keys == ["one:0", "one:validation:0", "two:0", "two:test:0", "three:b:0"]
    for name, message in (("three", "has the splits a, b; name one"), ("two:dev", "has the splits train, test")):
        with pytest.raises(ValueError, match=message):
            read(tmp_path / name)
    with pytest.raises(ValueError, match="has no splits; drop :x"):
        saved(tmp_path / "flat", ROWS)
        read(tmp_path / "flat:x")


def test_a_name_of_the_hub_and_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is out of reach of a test; what is asked of the library is not."""
    datasets = pytest.importorskip("datasets", reason="not installed: datasets")
    asked = []

    def load_dataset(name: str, trust_remote_code: bool) -> Any:
        asked.append(name)
        if name == "owner/none":
            raise ConnectionError("no network\nhere")
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert read(Path("owner/talks"))[0][0].key == "talks:0" and read(Path("owner/talks:train"))[0]
    assert asked == ["owner/talks", "owner/talks"]
    with pytest.raises(ValueError, match=r"data owner/none: neither a file .* gave: no network here"):
        read(Path("owner/none"))


def test_broken_tables_and_a_missing_library_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="not installed: datasets")
    (tmp_path / "d.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for name in ("d.parquet", "saved"):
        with pytest.raises(ValueError, match=f"{name}: not readable as"):
            read(tmp_path / name)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"needs the datasets library; install it with: pip install 'aquiline\[train\]'"
    ):
        read(tmp_path / "d.parquet")


@pytest.mark.parametrize("name", ["nowhere/train.jsonl", "nowhere", "/nowhere/at/all", "nowhere/d.json"])
def test_a_missing_path_is_not_looked_for_on_the_hub(name: str) -> None:
    with pytest.raises(ValueError, match=f"data path {name} does not exist"):
        read(Path(name))


def test_what_cannot_be_read_is_named_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    model = tiny.write_target(tmp_path / "target")
    (model / "model.safetensors").write_text("nobody reads it")
    good = tmp_path / "rows.jsonl"
    good.write_text("no row at all\n")
    for name in ("talks.parquet", "talks.arrow", "folder/talks.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "wrong.csv").write_text("a,b")
    needs = r"needs the datasets library.*'aquiline\[train\]'"
    for path, message in (
        (tmp_path / "talks.parquet", needs), (tmp_path / "talks.arrow", needs), (tmp_path / "folder", needs),
        (Path("owner/name:train"), needs), (tmp_path / "wrong.csv", "suffix must be one of"),
        (tmp_path / "missing.jsonl", "does not exist"),
    ):  # fmt: skip
        config = TrainConfig(model, (good, path), tmp_path / "out", capture=tiny.CAPTURE)
        with pytest.raises(ValueError, match=message):
            train(config, quiet=True)
        with pytest.raises(ValueError, match=message):
            train(replace(config, data=(good,), held_out=(path,)), quiet=True)

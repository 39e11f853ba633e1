"""Answers for training: the same rows whatever the batch, order or interruption; every row accounted for."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import TINY, engine_config, from_modules, needs_native, round_to, tiny_models, tiny_pair
from tests.disk import MESSAGE, full_after
from tests.engine.test_stops import letters
from tests.train.regenerating import ROWS, STOPS, TEMPLATE, llm, read, regenerate, target, write

from aquiline.config import Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.regenerate.answer_file import AnswerFile
from aquiline.regenerate.regenerate_config import RegenerateConfig
from aquiline.regenerate.regeneration import Regeneration
from aquiline.spec.drafting import Chain
from aquiline.text.chat_template import ChatTemplate

pytestmark = needs_native


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", ROWS)


@pytest.mark.parametrize("change", ["batch 1", "batch 8", "other order", "as they stand", "drafts", "no prefix cache"])
def test_rows_depend_on_nothing_but_their_number(change: str, checkpoint: Path, data: Path, tmp_path: Path) -> None:
    regenerate(checkpoint, data, tmp_path / "out.jsonl")
    engines = {"batch 1": llm(1), "batch 8": llm(8), "drafts": llm(3, Chain())}
    engines["no prefix cache"] = llm(prefix_cache=False)
    fields = {"other order": {"shuffle_seed": 7}, "as they stand": {"shuffle_seed": None}}.get(change, {})
    done = regenerate(checkpoint, data, tmp_path / "other.jsonl", engines.get(change), **fields)
    rows = read(tmp_path / "other.jsonl")
    for row in rows.values():
        assert ("rejected" in row) == (change == "drafts")
        row.pop("rejected", None)  # what a draft missed, which no other run can know
    assert rows == read(tmp_path / "out.jsonl")
    assert done.summary.counters.tau > 0 and (done.summary.counters.num_draft_tokens > 0) == (change == "drafts")
    ids = [json.loads(line)["id"] for line in (tmp_path / "other.jsonl").read_text().splitlines()]
    assert change != "batch 1" or ids == sorted(ids, key=ids.index) != sorted(ids)


@pytest.mark.parametrize(
    ("num_kept", "torn"), [(0, ""), (0, '{"id": 3, "sou'), (3, ""), (3, '{"id": 3, "sou'), (7, "")]
)
def test_a_killed_run_is_continued(
    num_kept: int, torn: str, checkpoint: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    regenerate(checkpoint, data, whole)
    kept = "".join(whole.read_text().splitlines(keepends=True)[:num_kept])
    regenerate(checkpoint, data, out, limit=1)  # for the settings beside it
    out.write_text(kept + torn)
    capsys.readouterr()
    done = regenerate(checkpoint, data, out)
    assert (done.num_done, done.num_resumed, done.num_failed, done.num_skipped) == (7, num_kept, 0, 0)
    assert out.read_text().startswith(kept) and read(out) == read(whole)
    assert ("out.jsonl: the last row was cut and is dropped" in capsys.readouterr().err) == bool(torn)
    written = sum(sum(row["loss_mask"]) for row in read(whole).values())
    assert done.total.num_answer_tokens == written
    assert sum(t.num_answer_tokens for t in done.by_temperature.values()) == written
    assert done.answer_tokens == written - sum(sum(json.loads(line)["loss_mask"]) for line in kept.splitlines())


def test_a_full_disk_is_named_and_costs_no_row(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    regenerate(checkpoint, data, tmp_path / "whole.jsonl")
    whole = read(tmp_path / "whole.jsonl")
    half = (tmp_path / "whole.jsonl").stat().st_size // 2
    with full_after(half), pytest.raises(OSError, match=rf"out\.jsonl: {MESSAGE}\. Its whole rows stay"):
        regenerate(checkpoint, data, tmp_path / "out.jsonl")
    done = regenerate(checkpoint, data, tmp_path / "out.jsonl")
    assert 0 < done.num_resumed < len(whole) and read(tmp_path / "out.jsonl") == whole


def test_rows_add_up_and_bad_ones_say_why(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[Any] = [
        *ROWS, "{broken", "", {"messages": [{"role": "assistant", "content": "alone"}]}, {"text": "z" * 70}, [1],
        {"messages": [{"role": "user", "content": t} for t in ("short", "y" * 60, "never asked")]},
        {"messages": [{"role": "tool", "content": "x"}]}, {"prompt": "Once"},
        {"conversations": [
            {"from": "system", "value": "Be"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "gone"}]},
    ]  # fmt: skip
    data, out = write(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl"
    done = regenerate(checkpoint, data, out, llm(max_context=64))
    assert (done.num_rows, done.num_done, done.num_failed, done.skipped) == (15, 10, 4, {"too long": 1})
    assert done.num_done + done.num_failed + done.num_skipped == done.num_rows and done.num_shortened == 1
    shown = capsys.readouterr().err.splitlines()
    said = sorted(done.reasons, key=lambda reason: int(reason.split("line ")[1].split(":")[0]))
    expected = {
        8: "not JSON", 10: "no message of a user", 11: "prompt of 73 tokens + max_tokens=12 exceeds max_context=64",
        12: "JSON list", 13: "turn 2 is not asked, its row ends before it: prompt of", 14: "role 'tool'",
    }  # fmt: skip
    for reason, (line, part) in zip(said, expected.items(), strict=True):
        assert reason.startswith(f"{data} line {line}: ") and part in reason, reason
        assert reason.count(str(data)) == 1 and f"aquiline: {reason}" in shown
    found = read(out)
    assert found[11]["num_turns_left"] == 2 and len(found[11]["finish_reasons"]) == 1
    assert [m["role"] for m in found[14]["messages"]] == ["system", "user", "assistant"]
    assert found[14]["messages"][2]["content"] != "gone" and found[13]["messages"][0]["content"] == "Once"
    again = regenerate(checkpoint, data, out, llm(max_context=64))
    assert (again.num_done, again.num_resumed, again.num_failed, again.skipped) == (10, 10, 4, {"too long": 1})


def test_labels_that_cannot_be_written_fail_their_row_alone(checkpoint: Path, tmp_path: Path) -> None:
    rows = [
        '{"prompt": "a", "source": "\\ud800"}',
        '{"prompt": "b", "source": ' + "[" * 5000 + "]" * 5000 + "}",
        ROWS[0],
    ]
    done = regenerate(checkpoint, write(tmp_path / "prompts.jsonl", rows), tmp_path / "out.jsonl")
    assert (done.num_done, done.num_failed) == (1, 2) and list(read(tmp_path / "out.jsonl")) == [2]
    assert sorted(reason.partition(": ")[2][:22] for reason in done.reasons) == [
        "not JSON (it nests lis", "source: hold half a su",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "wrong", [{"max_tokens": 2.5}, {"seed": True}, {"temperatures": ("0",)}, {"start": 1.0}, {"data": ("x",)}]
)
def test_settings_are_of_their_types(wrong: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.*must be"):
        RegenerateConfig(**{"data": (tmp_path,), "out": tmp_path} | wrong)


def test_a_file_of_other_settings_is_refused_and_left_alone(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    regenerate(checkpoint, data, out)
    before = out.read_bytes()
    other = target(tmp_path / "other", TEMPLATE.replace("#", "%"))
    more = write(tmp_path / "more.jsonl", [*ROWS, ROWS[0]])
    changes: list[tuple[str, dict[str, Any]]] = [
        (r"max_tokens=13: .*out\.jsonl was written with 12; .*another --out", {"max_tokens": 13}),
        (r"seed=1: .* written with 0", {"seed": 1}),
        (r"temperatures=\[0\.0, 1\.0\]: .* written with \[0\.0, 0\.8, 1\.0\]",
         {"temperatures": (0.0, 1.0), "temperature_weights": (1.0, 1.0)}),
        (r"max_context=100: .* written with 400", {"engine": llm(max_context=100)}),
        ("dtype=.*float32.* written with .*bfloat16", {"engine": llm(models=tiny_models("float32", 0, STOPS))}),
        ("target_fingerprint=", {"checkpoint": other}),
        ("data_sha256=", {"data": more}),
    ]  # fmt: skip
    for message, change in changes:
        arguments: dict[str, Any] = {"checkpoint": checkpoint, "data": data, "out": out} | change
        with pytest.raises(ValueError, match=message):
            regenerate(**arguments)
    assert out.read_bytes() == before
    assert regenerate(checkpoint, data, out, llm(max_batch=5), shuffle_seed=3, limit=2).num_resumed == 7, (
        "no such setting"
    )
    out.write_bytes(before + before.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=r"line 8 is no row of this command, or the second of its id"):
        regenerate(checkpoint, data, out)
    out.with_name("out.jsonl.meta.json").unlink()
    with pytest.raises(
        ValueError, match=r"out\.jsonl\.meta\.json beside it.* is missing or broken; choose another --out"
    ):
        regenerate(checkpoint, data, out)
    with AnswerFile(tmp_path / "busy.jsonl", {}), pytest.raises(ValueError, match="another run writes it"):
        regenerate(checkpoint, data, tmp_path / "busy.jsonl")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="choose another --out"):
        regenerate(checkpoint, data, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_parts_of_the_rows_make_up_all_of_them(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    regenerate(checkpoint, data, tmp_path / "whole.jsonl")
    whole, parts = read(tmp_path / "whole.jsonl"), dict[int, Any]()
    for name, fields in {"a": {"limit": 3}, "b": {"start": 3, "limit": 2}, "c": {"start": 5}}.items():
        done = regenerate(checkpoint, data, tmp_path / name, **fields)
        assert done.num_done == {"a": 3, "b": 2, "c": 2}[name] and done.num_skipped == 7 - done.num_done
        part = read(tmp_path / name)
        assert not part.keys() & parts.keys()
        parts |= part
    assert parts == whole
    (tmp_path / "a.gz").write_bytes(gzip.compress((tmp_path / "a").read_bytes()))
    done = regenerate(checkpoint, data, tmp_path / "d", skip_ids=(tmp_path / "a.gz", tmp_path / "b"), limit=1)
    assert (
        done.skipped == {"in skip_ids": 5, "behind limit": 1}
        and read(tmp_path / "d").keys() < read(tmp_path / "c").keys()
    )
    done = regenerate(checkpoint, data, tmp_path / "d", skip_ids=(tmp_path / "a",), limit=3)
    assert (done.num_done, done.num_resumed, done.num_skipped) == (3, 1, 4), "a larger limit continues"
    with pytest.raises(ValueError, match=r"prompts\.jsonl line 1: skip_ids reads rows with an id"):
        regenerate(checkpoint, data, tmp_path / "e", skip_ids=(data,))
    assert not (tmp_path / "e").exists()


def test_temperatures_are_mixed_by_weight_and_row() -> None:
    config = RegenerateConfig((Path("x"),), Path("y"))
    draws = [config.draw(row) for row in range(4000)]
    assert draws == [config.draw(row) for row in range(4000)]
    for temperature, weight in zip(config.temperatures, config.temperature_weights, strict=True):
        share = sum(draw[0] == temperature for draw in draws) / 4000
        assert abs(share - weight) < 4 * (weight * (1 - weight) / 4000) ** 0.5
    assert len({seed for _, seed in draws}) == 4000 and all(0 <= seed < 2**48 for _, seed in draws)
    other = dataclasses.replace(config, seed=1)
    assert 0.3 < sum(other.draw(row)[0] == draws[row][0] for row in range(4000)) / 4000 < 0.42, "0.36 by chance"
    only = dataclasses.replace(config, temperatures=(0.0, 0.5), temperature_weights=(0.0, 3.0))
    assert {only.draw(row)[0] for row in range(50)} == {0.5}


def test_rows_whose_logits_are_no_numbers_fail_alone(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """The embedding of "Z" is NaN: whoever reads it fails; the other rows are those of the sound target."""
    decoder, head = tiny_pair(config=dataclasses.replace(TINY, eos_token_ids=STOPS))
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
    decoder.embed.data[letters().token_to_id("Z")] = float("nan")
    poisoned = from_modules(decoder, head, None, Loading("bfloat16"), Environment.read())
    rows = write(tmp_path / "rows.jsonl", [*ROWS, {"prompt": "xyZ"}])
    done = regenerate(checkpoint, rows, tmp_path / "out.jsonl", llm(models=poisoned))
    regenerate(checkpoint, rows, tmp_path / "sound.jsonl")
    found, sound = read(tmp_path / "out.jsonl"), read(tmp_path / "sound.jsonl")
    assert any("line 8: " in reason and "are NaN" in reason for reason in done.reasons)
    assert 0 < done.num_done == 8 - done.num_failed and found == {row: sound[row] for row in found}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"data": ()}, "data="),
        ({"temperatures": (0.0, -1.0), "temperature_weights": (1, 1)}, "temperature=-1.0"),
        ({"temperatures": (0.0,)}, r"temperature_weights=\(0\.4, 0\.4, 0\.2\): must be one number"),
        ({"temperature_weights": (0.0, 0.0, 0.0)}, "not all of them 0"),
        ({"temperature_weights": (1.0, -1.0, 1.0)}, "temperature_weights="),
        ({"temperature_weights": (1.0, float("nan"), 1.0)}, "temperature_weights="),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"start": -1}, "start=-1"),
        ({"limit": 0}, "limit=0"),
    ],
)
def test_settings_that_cannot_work_are_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        RegenerateConfig(**{"data": (Path("x"),), "out": Path("y")} | fields)


def test_a_target_without_a_tokenizer_is_refused(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    template = ChatTemplate.load(checkpoint, letters())
    runs = LLM.from_models(tiny_models(), engine_config(3))
    with pytest.raises(ValueError, match=r"has no tokenizer\.json, and prompts are text"):
        Regeneration(runs, template, RegenerateConfig((data,), tmp_path / "out.jsonl"), {})

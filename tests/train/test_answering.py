"""The ids of a conversation are those the engine computed on; the mask is 1 on what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.conftest import needs_native
from tests.engine.test_stops import letters
from tests.train.regenerating import ROWS, STOPS, TEMPLATE, TURNS, llm, read, regenerate, target, write

from aquiline.config import SamplingParams
from aquiline.text.chat_template import ChatTemplate
from aquiline.train.documents import Rejects, row_reader
from aquiline.train.readers import read_documents

pytestmark = needs_native


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "prompts.jsonl", ROWS)


def test_every_turn_is_answered_on_the_ids_before_it(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    """Letters survive decoding and encoding, so the ids must be those of the whole conversation, encoded at once."""
    done = regenerate(checkpoint, data, tmp_path / "out.jsonl")
    rows, alone = read(tmp_path / "out.jsonl"), llm(max_batch=1, prefix_cache=False)
    template = ChatTemplate.load(checkpoint, letters())
    assert (done.num_rows, done.num_done, done.num_failed, done.num_skipped) == (7, 7, 0, 0)
    seen = set()
    for number, turns in enumerate(TURNS):
        row = rows[number]
        assert [m["content"] for m in row["messages"] if m["role"] == "user"] == turns
        assert (row["source"], row["license"]) == ("s", "MIT")
        assert not {"note", "category", "num_turns_left"} & row.keys()
        ids, mask = row["token_ids"], row["loss_mask"]
        begins = [i for i in range(1, len(ids)) if mask[i] > mask[i - 1]]
        assert len(mask) == len(ids) and len(begins) == len(turns) == len(row["finish_reasons"])
        for begin, reason in zip(begins, row["finish_reasons"], strict=True):
            sampling = SamplingParams(max_tokens=12, temperature=row["temperature"], seed=row["seed"])
            (output,) = alone.generate([ids[:begin]], sampling)
            written, is_inner = output.token_ids, begin != begins[-1]
            if is_inner and written[-1] in STOPS and written[-1] != STOPS[1]:
                written = written[:-1]  # the template's own end of a turn stands in its place
            end = begin + len(written)
            assert ids[begin:end] == written and all(mask[begin:end]) and not any(mask[end : end + 1])
            assert reason == output.finish_reason == ("stop" if output.token_ids[-1] in STOPS else "length")
            assert not is_inner or STOPS[1] in ids[end - 1 : end + 1], "every inner turn ends as the template says"
            seen.add((is_inner, output.token_ids[-1] if reason == "stop" else reason))
        ended = ids if row["finish_reasons"][-1] == "length" else ids[:-1]
        whole = template.encode(row["messages"], add_generation_prompt=False)
        assert [*ended, STOPS[1]] == whole
    assert {(True, STOPS[1]), (True, "length"), (False, "length")} < seen and (True, STOPS[0]) in seen, seen


def test_training_reads_the_rows_as_they_are(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    regenerate(checkpoint, data, tmp_path / "out.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    rejects, ids = Rejects(), row_reader(checkpoint, 96, None, STOPS)
    documents = list(read_documents([tmp_path], ids, rejects))
    assert [(d.tokens.tolist(), d.mask.tolist()) for d in documents if d.mask is not None] == [
        (row["token_ids"], row["loss_mask"]) for row in rows
    ]


@pytest.mark.parametrize(
    ("template", "has_stop"),
    [(None, False), ("{% for m in messages %}{{ m.content }}~{% endfor %}", False), (TEMPLATE, True)],
)
def test_a_stop_token_stays_where_the_template_writes_it(
    template: str | None, has_stop: bool, data: Path, tmp_path: Path
) -> None:
    regenerate(target(tmp_path / "target", template), data, tmp_path / "out.jsonl", max_tokens=40)
    kept, stopped = [], 0
    for row in read(tmp_path / "out.jsonl").values():
        ids, mask, reasons = row["token_ids"], row["loss_mask"], row["finish_reasons"]
        assert (ids[-1] in STOPS) == (reasons[-1] == "stop")
        kept += [token for token, is_own in zip(ids[:-1], mask, strict=False) if is_own and token in STOPS]
        stopped += reasons[:-1].count("stop")
    assert set(kept) == ({STOPS[1]} if has_stop else set()) and len(kept) < stopped


def test_a_template_that_drops_answers_is_used_for_one_turn(data: Path, tmp_path: Path) -> None:
    forgetful = target(tmp_path / "target", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    done = regenerate(forgetful, data, tmp_path / "out.jsonl")
    assert done.num_done == 7 and done.num_shortened == sum(len(turns) > 1 for turns in TURNS)
    assert all("writes an earlier answer 0 times" in reason for reason in done.reasons)

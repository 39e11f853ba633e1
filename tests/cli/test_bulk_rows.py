"""Rows of a prompts file: whatever stands in one is answered or becomes an error row, and the others run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import engine_config, tiny_models
from tests.engine.test_stops import letters
from tests.json_values import ANY_JSON, nested
from tests.train.regenerating import target

from aquiline.config import SamplingParams
from aquiline.engine.bulk import SAMPLING_FIELDS, BulkResult, BulkRun
from aquiline.engine.llm import LLM
from aquiline.spec.lookup import Lookup
from aquiline.text.chat_template import ChatTemplate

SAMPLING = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM.from_models(dataclasses.replace(tiny_models(), tokenizer=letters()), engine_config(3))


def answers(
    llm: LLM, lines: list[bytes], place: Path, template: ChatTemplate | None = None
) -> tuple[list[dict[str, Any]], BulkResult]:
    """The output of a run over these lines, and what the run says of itself."""
    (place / "rows.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    out = place / "out.jsonl"
    out.unlink(missing_ok=True)
    result = BulkRun(place / "rows.jsonl", out, SAMPLING, {}).run(llm, template)
    return [json.loads(line) for line in out.read_bytes().removesuffix(b"\n").split(b"\n")], result


def test_a_line_ends_at_a_line_feed_alone(llm: LLM, tmp_path: Path) -> None:
    """str.splitlines ends lines at all of these, and JSON strings hold them as they are."""
    rows = [{"prompt": f"a{end}b", "id": f"x{end}y"} for end in ("\u2028", "\u2029", "\x85", "\x7f", "\U0001f600")]
    found, result = answers(llm, [json.dumps(r, ensure_ascii=False).encode() for r in rows], tmp_path)
    assert result.failed == {} and [f["id"] for f in found] == [r["id"] for r in rows]
    windows, result = answers(llm, [b"\xef\xbb\xbf" + b'{"prompt": "ab"}\r', b'{"prompt": "cd"}\r'], tmp_path)
    assert result.failed == {} and len(windows) == 2, "a byte order mark and carriage returns, as Windows writes them"


BAD: list[tuple[bytes, str]] = [
    (b"{", "is not JSON"),
    (b"", "is not JSON"),
    (b'{"prompt": "\xff"}', "is not JSON ('utf-8' codec can't decode"),
    (nested(100_000).encode(), "deeper than 100 levels"),
    (b'{"prompt": "a", "id": ' + nested(985).encode() + b"}", "deeper than 100 levels"),
    (b'{"prompt": "a", "id": ' + b"1" * 5000 + b"}", "is not JSON (Exceeds the limit"),
    (b"[1]", 'is a JSON list; write an object with "prompt" or "token_ids"'),
    (b'{"prompt": "a", "token_ids": [1]}', "one of them"),
    (b'{"prompt": ["a"]}', "prompt=['a']: must be a text"),
    (b'{"prompt": "a\\ud800"}', r"prompt='a\ud800': holds bytes that are not UTF-8"),
    (b'{"token_ids": 5}', "token_ids=5: must be a list"),
    (b'{"token_ids": [1.5]}', "token_ids: 1.5 is among them; each must be a whole number"),
    (b'{"token_ids": [true]}', "token_ids: True is among them"),
    (b'{"token_ids": [[1]]}', "token_ids: [1] is among them"),
    (b'{"prompt": "a", "id": "\\ud800"}', r"id='\ud800': must be a whole number or a text"),
    (b'{"prompt": "a", "id": ["x"]}', "id=['x']: must be a whole number or a text"),
    (b'{"prompt": "a", "id": NaN}', "id=nan: must be"),
    (b'{"prompt": "a", "stop": [5]}', "stop=(5,): must be"),
    (b'{"prompt": "a", "stop": "b"}', "stop='b': must be"),
    (b'{"prompt": "a", "stop": ["\\ud800"]}', r"stop=('\ud800',)"),
    (b'{"prompt": "a", "stop_token_ids": ["a"]}', "stop_token_ids=('a',): must be"),
    (b'{"prompt": "a", "stop_token_ids": [1.5]}', "stop_token_ids=(1.5,): must be"),
    (b'{"prompt": "a", "max_tokens": true}', "max_tokens=True: must be a whole number"),
    (b'{"prompt": "a", "max_tokens": null}', "max_tokens=None: must be a whole number"),
    (b'{"prompt": "a", "ignore_eos": "no"}', "ignore_eos='no': must be True or False"),
    (b'{"prompt": "a", "temperature": "1"}', "temperature='1': must be a number"),
    (b'{"prompt": "a", "seed": 1.0}', "seed=1.0: must be a whole number or None"),
    (b'{"prompt": "a", "logit_bias": [1]}', "logit_bias=[1]: must be an object"),
    (b'{"prompt": "a", "logit_bias": {"x": 1}}', "logit_bias={'x': 1}: must be an object from token ids"),
    (b'{"prompt": "a", "logit_bias": {"3": "1"}}', "logit_bias={3: '1'}: must be"),
    (b'{"prompt": "a", "prediction": 5}', "prediction=5: must be a text or a list of token ids"),
    (b'{"prompt": "a", "prediction": [1.5]}', "prediction: 1.5 is among them; each must be a whole number"),
    (b'{"prompt": "a", "prediction": [-1]}', "prediction token -1: must be in [0, 96)"),
    (b'{"prompt": "a", "prediction": "\\ud800"}', r"prediction='\ud800': holds bytes that are not UTF-8"),
]


def test_every_bad_row_says_why_and_the_others_run(llm: LLM, tmp_path: Path) -> None:
    good = b'{"prompt": "abc", "id": "good"}'
    found, result = answers(llm, [line for bad, _ in BAD for line in (bad, good)], tmp_path)
    assert len(found) == 2 * len(BAD) and list(result.failed) == [1 + 2 * i for i in range(len(BAD))]
    for i, (line, said) in enumerate(BAD):
        assert said in found[2 * i]["error"] == result.failed[1 + 2 * i], line
    assert len({f["text"] for f in found[1::2]}) == 1 and {f["id"] for f in found[1::2]} == {"good"}


def test_a_bad_row_of_a_chat(llm: LLM, tmp_path: Path) -> None:
    template = ChatTemplate.load(target(tmp_path / "target"), llm.models.tokenizer)
    lines = [b'{"prompt": "a\\ud800"}', b'{"prompt": "abc"}']
    found, result = answers(llm, lines, tmp_path, template)
    assert list(result.failed) == [1] and "half a surrogate pair" in found[0]["error"] and found[1]["text"]


@settings(max_examples=50)
@given(
    row=st.dictionaries(
        st.sampled_from(sorted({"id", "prompt", "token_ids", "prediction"} | SAMPLING_FIELDS)), ANY_JSON, max_size=2
    )
)
@example({"prompt": "a", "logprobs": 2**31})
@example({"prompt": "a", "prompt_logprobs": 10**400})
@example({"prompt": "a", "max_tokens": 10**400})
@example({"prompt": "a", "logit_bias": {"2": 0, "02": 1, "1" * 4000: 1}})
def test_any_row(llm: LLM, tmp_path_factory: pytest.TempPathFactory, row: dict[str, Any]) -> None:
    lines = [json.dumps({"prompt": "b"} | row).encode(), json.dumps(row).encode(), b'{"prompt": "abc"}']
    found, result = answers(llm, lines, tmp_path_factory.getbasetemp())
    assert len(found) == 3 and "error" not in found[2]
    assert set(result.failed) == {number for number, output in enumerate(found, 1) if "error" in output}


def test_rows_have_predictions(llm: LLM, tmp_path: Path) -> None:
    """They make the row cheaper and never change its text."""
    looking = LLM.from_models(llm.models, engine_config(1), Lookup(min_match=1, min_confidence=0))
    row = {"prompt": "abc", "max_tokens": 20}
    plain = answers(llm, [json.dumps(row).encode()], tmp_path)[0][0]
    lines = [
        json.dumps(row | {"prediction": prediction}).encode()
        for prediction in (None, "", plain["text"], plain["token_ids"], [])
    ]
    found, result = answers(looking, lines, tmp_path)
    assert not result.failed and {f["text"] for f in found} == {plain["text"]}
    assert [f["tau"] > 4 for f in found] == [False, False, True, True, False]


def test_token_ids_are_whole_numbers_in_python_too(llm: LLM) -> None:
    import numpy as np

    for ids in ([1.5], [True], ["1"], [None]):
        with pytest.raises(ValueError, match="is among them; each must be a whole number"):
            llm.generate([ids])  # type: ignore[list-item]
    same = [llm.generate([ids], SAMPLING)[0] for ids in ([1, 2], list(np.array([1, 2])))]
    assert same[0].token_ids == same[1].token_ids and all(type(t) is int for t in same[1].prompt_ids)

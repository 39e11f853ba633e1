"""The table of what steps cost: measured for any model, kept, and measured anew where what was kept cannot be one."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import TINY, TINY_DRAFT, engine_config, from_modules, needs_native, tiny_models, tiny_pair
from tests.engine.driving import add, finish, words

from aquiline.config import Environment, SamplingParams, cache_directory
from aquiline.engine.control import calibrate
from aquiline.engine.control.acceptance import Pool
from aquiline.engine.control.calibrate import cost_table, estimated_table, measured_table
from aquiline.engine.control.controller import Controller
from aquiline.engine.control.costs import MAX_TABLE_ROWS, MIN_MS, CostTable, StepCosts
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.spec.adaptive import Adaptive

TABLE = dataclasses.asdict(estimated_table(10**8, has_draft=True)) | {"keys": ((1000.0, 0.1), (4000.0, 0.7))}


@pytest.fixture(autouse=True)
def _measures_briefly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name, value in (
        ("MAX_SECONDS", 0.02),
        ("REPEATS", 1),
        ("MEASURED_ROWS", (1, 2, 4, 8, 16)),
        ("MEASURED_SEQUENCES", (1, 4)),
        ("LONG_KV_BYTES", 1e6),
    ):
        monkeypatch.setattr(calibrate, name, value)


def models_of(max_positions: int, isa: str | None = None) -> LoadedModels:
    small = dataclasses.replace(TINY, max_positions=max_positions)
    draft = dataclasses.replace(TINY_DRAFT, model=dataclasses.replace(small, num_layers=1))
    return from_modules(*tiny_pair(config=small, draft=draft), None, Loading("float32"), Environment(isa, 1))


@needs_native
@pytest.mark.parametrize("max_positions", [1, 15, 63, 64, 79, 80, 143, 144, 145, 400])
def test_a_table_is_measured_for_any_context(max_positions: int) -> None:
    table = measured_table(models_of(max_positions))
    assert table.verify[1] > MIN_MS and table.first[1] > MIN_MS and table.keys[0][0] > 1000


@pytest.mark.parametrize("isa", [pytest.param(None, marks=needs_native), "off"])
def test_a_short_context_drafts_adaptively(isa: str | None) -> None:
    """It is the default way to draft."""
    llm = LLM.from_models(models_of(60, isa), engine_config(2, calibration=True))
    sequence = add(llm, "a", words(20), drafting=Adaptive())
    finish(llm)
    assert len(sequence.output_ids) == 20


def test_a_backend_that_times_no_steps_has_its_drafting_measured() -> None:
    """By what a step that drafts takes beyond one that verifies as many rows."""
    table = measured_table(models_of(400, "off"))
    assert table.verify[1] / (TINY.num_layers + 1) <= table.first[1] < 100 * table.verify[1]


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    "zeros": lambda t: t.update({name: [0.0] * (MAX_TABLE_ROWS + 1) for name in ("verify", "first", "deeper")}),
    "forwards of no time": lambda t: t.update(verify=[0.0] * (MAX_TABLE_ROWS + 1)),
    "drafts of no time": lambda t: t.update(first=[0.0] * (MAX_TABLE_ROWS + 1)),
    "not a number": lambda t: t["verify"].__setitem__(7, float("nan")),
    "only not numbers": lambda t: t.update(first=[0.0] + [float("nan")] * MAX_TABLE_ROWS),
    "infinity": lambda t: t["deeper"].__setitem__(MAX_TABLE_ROWS, float("inf")),
    "below 0": lambda t: t["first"].__setitem__(1, -1.0),
    "beyond floats": lambda t: t["verify"].__setitem__(MAX_TABLE_ROWS, 10**400),
    "near nothing": lambda t: t["verify"].__setitem__(1, 1e-320),
    "falling": lambda t: t["verify"].__setitem__(9, 2.0 * t["verify"][10]),
    "too short": lambda t: t["verify"].pop(),
    "too long": lambda t: t["deeper"].append(1e3),
    "a first of some time": lambda t: t["verify"].__setitem__(0, 1e-3),
    "keys twice": lambda t: t.update(keys=[[10.0, 1.0], [10.0, 1.0]]),
    "no keys at all": lambda t: t.update(keys=[[0.0, 0.0]]),
    "keys of no number": lambda t: t.update(keys=[[float("nan"), 1.0]]),
    "keys that fall": lambda t: t.update(keys=[[10.0, 1.0], [20.0, 0.5]]),
    "keys below 0": lambda t: t.update(keys=[[10.0, -1.0]]),
    "a point of three": lambda t: t.update(keys=[[10.0, 1.0, 1.0]]),
    "a row of keys": lambda t: t.update(key_row_ms=float("nan")),
    "a key of the draft": lambda t: t.update(draft_key_ms=-1e-9),
    "a text": lambda t: t.update(key_row_ms="fast"),
    "nothing": lambda t: t.pop("first"),
}


@needs_native
@pytest.mark.parametrize("name", BROKEN)
def test_a_kept_table_that_none_can_be_is_measured_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_is_measured_anew(lambda text: json.dumps(edited(json.loads(text), BROKEN[name])), monkeypatch)


@needs_native
@pytest.mark.parametrize("text", [None, "", "{", "[]", "7", "null", '"verify"', "[" * 5000, '{"verify": 1}', "\x00"])
def test_a_kept_file_that_is_no_table_is_measured_anew(text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: the file was cut."""
    assert_is_measured_anew(lambda sound: sound[: len(sound) // 2] if text is None else text, monkeypatch)


def test_a_step_of_many_rows_makes_no_other_number_dear() -> None:
    """Behind many rows the next four steps find less in the caches, and take half as long again."""
    measurement, warm = object.__new__(calibrate._Measurement), [0]
    measurement.has_draft, measurement.deadline = False, math.inf

    def verify(rows: int) -> calibrate._StepTimes:
        took = (1.0 + 0.1 * rows) * (1.0 if warm[0] >= 4 else 1.5)
        warm[0] = 0 if rows > 32 else warm[0] + 1
        return calibrate._StepTimes(took, 0.0)

    measurement._verify = verify  # type: ignore[method-assign]
    measurement._keys = lambda: ((), 0.0, 0.0)  # type: ignore[method-assign]
    table = measurement.table()
    assert [table.verify[rows] for rows in (1, 2, 3, 4, 8, 16)] == pytest.approx([1.1, 1.2, 1.3, 1.4, 1.8, 2.6])


@needs_native
def test_a_table_of_a_busy_machine_is_measured_again_and_the_least_disturbed_one_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models, base = tiny_models(), CostTable(**TABLE)
    tables = [dataclasses.replace(base, key_row_ms=float(number)) for number in range(4)]

    def starts(*shares: float) -> list[int]:
        """Which of the tables each start takes, where others use these shares while they are measured; one more start
        may measure nothing."""
        for file in cache_directory().glob("costs-*.json"):
            file.unlink()
        left, found = list(zip(tables, shares, strict=False)), list[int]()
        for _ in range(len(shares) + 1):
            monkeypatch.setattr(calibrate, "measured_table", lambda models: left[0][0])
            monkeypatch.setattr(calibrate._Watch, "others", lambda watch: left.pop(0)[1])
            found.append(tables.index(cost_table(models, True)))
        assert not left
        return found

    assert starts(0.1) == [0, 0]
    assert starts(0.5, 0.0) == [0, 1, 1]
    assert "while others used 50 % of the processors; the next start measures again" in caplog.text
    caplog.clear()
    assert starts(0.5, 0.3, 0.4) == [0, 1, 1, 1]
    assert caplog.text.count("measures again") == 2, "after MAX_TRIES nothing is promised"


def test_the_work_of_others_is_seen() -> None:
    watch = calibrate._Watch()
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        share = watch.others()
    finally:
        child.kill()
        child.wait()
    assert 0.3 / len(os.sched_getaffinity(0)) < share <= 1.1
    assert calibrate._Watch().others() == 0.0, "no time has passed"


def edited(table: dict[str, Any], edit: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    edit(table)
    return table


def assert_is_measured_anew(change: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    models, measured = tiny_models(), CostTable(**TABLE)
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "measured_table", lambda models: measured)
        patch.setattr(calibrate._Watch, "others", lambda watch: 0.0)
        assert cost_table(models, True) is measured
        [file] = cache_directory().glob("costs-*.json")
        patch.setattr(calibrate, "measured_table", lambda models: pytest.fail("it is kept"))
        assert cost_table(models, True) == measured
        sound = file.read_text()
        file.write_text(change(sound))
        patch.setattr(calibrate, "measured_table", lambda models: measured)
        assert cost_table(models, True) is measured, "the broken one was taken"
        assert file.read_text() == sound


@needs_native
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_run_begins_with_the_chances_that_the_last_one_learnt(
    is_closed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def after(num_tokens: int, has_calibration: bool = True) -> tuple[list[list[float]], list[list[float]]]:
        """What a run begins with, and what it ends with."""
        llm = LLM.from_models(models_of(400), engine_config(1, calibration=has_calibration))
        llm.engine.prepare_choosing()
        assert llm.engine.controller is not None
        pool = llm.engine.controller.pools[0]
        began = pool.counts()
        if num_tokens:
            llm.run([words(20)], SamplingParams(max_tokens=num_tokens, temperature=0.0), drafting=Adaptive())
        if is_closed:
            llm.close()
        del llm
        gc.collect()
        return began, pool.counts()

    unlearnt, first = after(60)
    began, second = after(0)
    assert unlearnt == Pool().counts() != first and began == first == second
    assert after(0, has_calibration=False)[0] == unlearnt, "nothing is read or written"
    [file] = cache_directory().glob("chances-*.json")
    for text in ("", "[]", '["a"]', "[" * 5000, file.read_text().replace("[", "{", 1)):
        file.write_text(text)
        caplog.clear()
        assert after(0)[0] == unlearnt and "chances" in caplog.text, text


@pytest.mark.parametrize("isa", [pytest.param(None, marks=needs_native), "off"])
def test_steps_without_times_teach_no_times(isa: str | None) -> None:
    """The torch path does not time its steps. What they took is then unknown, and not zero."""
    llm = LLM.from_models(models_of(400, isa), engine_config(2))
    llm.engine.prepare_choosing()
    controller = llm.engine.controller
    assert isinstance(controller, Controller)
    for seed in range(2):
        add(llm, seed, words(20, seed), SamplingParams(max_tokens=40, seed=seed, ignore_eos=True), Adaptive())
    finish(llm)
    costs, ledger = controller.costs, controller.ledger
    assert ledger.num_chosen > 30 and sum(ledger.steps.values()) > 60
    times = [costs.base_factor, costs.rows_factor, costs.keys_factor, costs.draft_factor, costs.host_ms]
    unlearnt = StepCosts(costs.table)
    nothing = [unlearnt.base_factor, unlearnt.rows_factor, unlearnt.keys_factor, unlearnt.draft_factor, 0.0]
    assert (times == nothing) == (isa == "off") and (ledger.num_timed == 0) == (isa == "off")
    assert llm.engine.pipeline.last is not None and (llm.engine.pipeline.last.seconds is None) == (isa == "off")

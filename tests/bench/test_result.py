"""Results: tau from output lengths in every scenario, and what must not be believed, field by field."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.conftest import TINY
from tests.gates import SELECT
from tests.results import BASELINE, CHAIN, NOTHING, at_speed, changed, measured, write_all

from aquiline.bench.gates.rules import Gate
from aquiline.bench.gates.verdicts import Streaks, ask
from aquiline.bench.results.integrity import differences, problems, recomputed_tau
from aquiline.bench.results.result import Result, read_results, write_result
from aquiline.bench.results.table import report
from aquiline.bench.suite.scenarios import ModelSource
from aquiline.bench.suite.suite import Progress, run_suite
from aquiline.bench.suite.suite_plan import PROFILES, Load, Plan
from aquiline.config import PairConfig
from aquiline.errors import ResultError

Path_ = tuple[str | int, ...]

DELETED = object()


def shrunk(loads: tuple[Load, ...]) -> tuple[Load, ...]:
    """The scenarios with their names and batches, behind contexts that take milliseconds."""
    return tuple(Load(x.name, max(16, x.context // 512), x.batch, x.is_random) for x in loads)


def assert_tau_holds(file: Path, num_requests: int) -> Result:
    """Tau from what a file says of its outputs: every token but the one its prefill gave came from a decode step."""
    result: Result = json.loads(file.read_text())
    drafting, lengths = result["eagle_speculation"], result["output"]["num_tokens"]
    assert len(lengths) == num_requests, file.name
    tau = (sum(lengths) - num_requests) / drafting["num_steps"]
    assert tau == pytest.approx(drafting["mean_acceptance_length"], rel=1e-12) == recomputed_tau(result), file.name
    assert problems(result) == []
    return result


@pytest.mark.rare
@pytest.mark.parametrize("profile", PROFILES)
def test_tau_from_output_lengths_is_the_reported_one_in_every_scenario(profile: str, tmp_path: Path) -> None:
    plan = Plan(
        profile, own_loads=shrunk(PROFILES[profile]), num_spec_tokens=(4,), temperatures=(0.0, 0.8), micro_steps=9,
        warmup_runs=0, measurement_runs=2,
    )  # fmt: skip
    source, progress = ModelSource(random_config=TINY), Progress()
    simulated = ModelSource(random_config=TINY, simulated_tau=2.5)
    results = list(run_suite(plan, source, simulated, tmp_path, progress))
    assert progress.skipped == []
    names = {result["scenario"]["name"] for result in results}
    assert names == {load.name for load in PROFILES[profile]}
    taus = set()
    for file in tmp_path.glob("*.json"):
        batch = int(re.findall(r"x(\d+)-t", file.name)[0])
        taus.add(assert_tau_holds(file, num_requests=batch * 2)["eagle_speculation"]["mean_acceptance_length"])
    assert len(list(tmp_path.glob("*.json"))) == len(results) and 1.0 in taus
    assert profile == "full" or max(taus) > 2, "the simulated tau was kept"


def test_tau_of_a_draft_that_is_accepted(tmp_path: Path) -> None:
    plan = Plan(
        own_loads=(Load("baseline", 64, 2),), num_spec_tokens=(3,), temperatures=(0.0, 0.8), micro_steps=24,
        measurement_runs=2,
    )  # fmt: skip
    list(run_suite(plan, ModelSource(PairConfig("bundled")), ModelSource(PairConfig("bundled")), tmp_path, Progress()))
    taus = {file.name: assert_tau_holds(file, num_requests=4) for file in tmp_path.glob("*.json")}
    drafted = [r["eagle_speculation"]["mean_acceptance_length"] for name, r in taus.items() if "chain" in name]
    assert len(taus) == 6 and min(drafted) > 1.2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        *(({f"scenario__{name}": 99}, f"scenario.{name}: ") for name in (
            "name", "profile", "context_tokens", "batch", "new_tokens", "temperature", "seed", "prompts_sha256",
        )),
        *(({f"model__{name}": "?"}, f"model.{name}: ") for name in ("target", "dtype", "arithmetic", "random_weights")),
        *(({f"system__{name}": "?"}, f"system.{name}: ") for name in ("cpu", "threads", "isa", "path")),
        ({"output__sha256": "f" * 64}, "output.sha256: the texts differ"),
        ({"output__num_tokens": [24] * 5 + [23]}, "output.num_tokens: "),
    ],
)  # fmt: skip
def test_results_of_other_work_or_machines_are_not_compared(fields: dict[str, Any], reason: str) -> None:
    baseline, chain = measured()[BASELINE], measured()[CHAIN]
    assert differences(chain, baseline) == []
    (told,) = differences(changed(chain, **fields), baseline)
    assert told.startswith(reason)


def test_texts_may_differ_where_they_need_not_be_equal() -> None:
    """Another engine's texts, and those of a simulated acceptance, are compared by their lengths alone."""
    baseline, chain = measured()[BASELINE], changed(measured()[CHAIN], output__sha256="f" * 64)
    assert differences(changed(chain, model__simulated_tau=2.0), baseline) == []
    assert differences(changed(chain, engine="llama.cpp"), baseline) == []


UNSOUND: dict[str, tuple[dict[str, Any], str]] = {
    "zero throughput": ({"throughput_tokens_per_sec": NOTHING}, "throughput_tokens_per_sec: is 0"),
    "a median that is not one": ({"throughput_tokens_per_sec__median": 1e6}, "throughput_tokens_per_sec: median, low"),
    "NaN for a median": ({"throughput_tokens_per_sec__median": math.nan}, "per_sec.median: nan is not"),
    "an interval of three runs": ({"throughput_tokens_per_sec__low": 1.0}, "throughput_tokens_per_sec: median, low"),
    "infinite": ({"ttft_ms__max": math.inf}, "ttft_ms.max: inf is not a finite number"),
    "another tau": ({"eagle_speculation__mean_acceptance_length": 3.5}, "mean_acceptance_length: 3.5"),
    "NaN for tau": ({"eagle_speculation__mean_acceptance_length": math.nan}, "mean_acceptance_length: nan is not"),
    "tokens that nobody made": ({"output__num_tokens": [24] * 5 + [25]}, "output.num_tokens: 145 tokens"),
    "two outputs in one": ({"output__num_tokens": [48, 24, 24, 24, 24]}, "output.num_tokens: 5 outputs, batch * "),
    "an output too long": ({"output__num_tokens": [25, 23, 24, 24, 24, 24]}, "25 tokens, scenario.new_tokens is 24"),
    "steps in words": ({"eagle_speculation__num_steps": "many"}, "num_steps: 'many' is not of type 'integer'"),
    "no steps": ({"eagle_speculation__num_prefilled": None}, "num_prefilled: None is not of type 'integer'"),
    "accepted tokens that nobody committed": (
        {"eagle_speculation__total_accepted_tokens": 1000}, "total_accepted_tokens 1000 + num_steps",
    ),
    "drafts counted per request": ({"eagle_speculation__num_drafts": 6}, "eagle_speculation.num_drafts: is 6"),
    "another acceptance rate": ({"eagle_speculation__mean_acceptance_rate": 0.9}, "mean_acceptance_rate: is 0.9"),
    "other positions": ({"eagle_speculation__per_position": [1, 1, 1]}, "per_position: in num_steps"),
    "a shorter chain": ({"setting__num_spec_tokens": 1}, "setting.num_spec_tokens: is 1, accepted positions reach"),
    "drafts of a baseline": ({"setting__drafter": "none"}, "drafts counted without a drafter"),
    "latency of another run": ({"latency_ms_per_token": NOTHING | {"values": [0.0]}}, "latency_ms_per_token: is not"),
    "a machine without a name": ({"system": {"threads": 1}}, "system.cpu: is missing"),
    "a run more": ({"scenario__measurement_runs": 4}, "3 values, measurement_runs says 4"),
    "another schema": ({"schema": "aquiline.result/1"}, "schema: 'aquiline.result/2' was expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_what_cannot_be_believed_is_refused(name: str, tmp_path: Path) -> None:
    fields, reason = UNSOUND[name]
    assert all(problems(result) == [] for result in measured().values())
    broken = changed(measured()[CHAIN], **fields)
    assert reason in "\n".join(problems(broken))
    write_all(measured() | {CHAIN: broken}, tmp_path)
    with pytest.raises(ResultError, match=f"(?s){re.escape(str(tmp_path))}: refused.*{CHAIN}: .*{re.escape(reason)}"):
        read_results(tmp_path)


def test_a_baseline_that_poses_as_a_chain_is_refused() -> None:
    posing = changed(measured()[BASELINE], setting__drafter="chain", setting__num_spec_tokens=3)
    assert problems(posing) == ["eagle_speculation.total_draft_tokens: is 0 with setting.drafter 'chain'"]
    assert problems(changed(measured()[BASELINE], setting__drafter="adaptive")) == [], "it may find that nothing pays"


def test_every_broken_file_is_named_at_once(tmp_path: Path) -> None:
    write_all({"a.json": {}, "b.json": at_speed(measured()[CHAIN], 1, 1, 1) | {"commit": ""}}, tmp_path)
    (tmp_path / "c.json").write_text('{"schema": ')
    with pytest.raises(ResultError, match=r"(?s)a\.json: .*scenario.*b\.json: commit: must not be empty") as error:
        read_results(tmp_path)
    assert "c.json: not JSON" in str(error.value)
    assert "a.json: result: 'eagle_speculation' is a required property" in str(error.value)


def test_a_directory_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="holds no results; run `aquiline bench"):
        read_results(tmp_path)
    with pytest.raises(ResultError, match="is no directory"):
        read_results(tmp_path / "absent")


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    file = tmp_path / "chain.json"
    write_result(measured()[CHAIN], file)
    assert read_results(tmp_path) == {"chain.json": measured()[CHAIN]}
    with pytest.raises(ResultError, match="throughput_tokens_per_sec: is 0"):
        write_result(changed(measured()[CHAIN], throughput_tokens_per_sec=NOTHING), file)
    assert [f.name for f in tmp_path.iterdir()] == ["chain.json"]


def paths(value: object, path: Path_ = ()) -> Iterator[Path_]:
    """Every field, inner ones and list items included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inner:
        yield (*path, name)
        yield from paths(item, (*path, name))


def mangled(result: Result, path: Path_, value: object) -> Result:
    """A copy in which a field is another, or none."""
    found = copy.deepcopy(result)
    owner: Any = found
    for name in path[:-1]:
        owner = owner[name]
    if value is DELETED:
        del owner[path[-1]]
    else:
        owner[path[-1]] = value
    return found


SAID_BY = {"num_steps": "mean_acceptance_length"} | dict.fromkeys(("cpu", "threads", "isa", "path"), "device")
"""Fields that may be refused in the name of what is computed from them."""
STATED_ONCE = (
    "memory", "repeated_share", "prompts_source", "commit", "roofline", "engine", "model", "scenario", "setting",
    "system", "ttft_ms", "itl_ms",
)  # fmt: skip
"""Fields that a table shows and nothing else in the file repeats: another sound value of theirs is another result."""
GATES = [
    Gate("greedy", "micro", "bundled", SELECT, {"min_speedup": 1e-3, "min_tau": 1.0, "min_steps": 8.0}),
]


def is_named(path: Path_, found: list[str]) -> bool:
    """Whether reasons speak of a field: of the innermost one, where a list's item is meant."""
    name = [part for part in path if isinstance(part, str)][-1]
    return any(said in "\n".join(found) for said in (name, SAID_BY.get(name, name)))


def all_paths() -> list[Path_]:
    return sorted(paths(measured()[CHAIN]), key=str)


ANYTHING = st.one_of(
    st.just(DELETED), st.none(), st.booleans(), st.integers(-5, 5), st.floats(), st.text(max_size=3),
    st.lists(st.floats(), max_size=2), st.dictionaries(st.text(max_size=2), st.none(), max_size=1),
)  # fmt: skip


@settings(max_examples=300)
@given(path=st.deferred(lambda: st.sampled_from(all_paths())), value=ANYTHING)
@example(path=("eagle_speculation", "num_steps"), value="x")
@example(path=("eagle_speculation", "mean_acceptance_length"), value=math.nan)
@example(path=("eagle_speculation", "num_steps"), value=1)
@example(path=("scenario", "temperature"), value=-0.5)
@example(path=("scenario", "context_tokens"), value=3)
def test_a_mangled_field_is_refused_by_name_or_harmless(
    path: Path_, value: object, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A gate sees no other figure, and a table shows no other one of those that are computed from others."""
    sound = measured()
    broken = sound | {CHAIN: mangled(sound[CHAIN], path, value)}
    found = problems(broken[CHAIN])
    if found:
        assert is_named(path, found), found
        return
    state = Streaks(tmp_path_factory.mktemp("state") / "gates.json")
    before, after = (ask(GATES, results, state).outcomes for results in (sound, broken))
    if not after or after[0].verdict == "red":
        return  # of another model, profile, scenario or setting now: nothing is shown to hold
    if after[0].verdict == "refused":
        why = [*after[0].refusals, *(reason for judgement in after[0].gates for reason in judgement.refusals)]
        assert is_named(path, why), why
        return
    assert after[0].gates[0].checks == before[0].gates[0].checks
    if not set(path) & set(STATED_ONCE):
        assert report(broken).markdown() == report(sound).markdown()


def test_a_deleted_field_is_refused_by_name_or_was_not_needed() -> None:
    sound = measured()
    unneeded = set()
    for path in all_paths():
        broken = mangled(sound[CHAIN], path, DELETED)
        found = problems(broken)
        assert not found or is_named(path, found), (path, found)
        if not found:
            unneeded.add(".".join(map(str, path)))
            assert report(sound | {CHAIN: broken}).markdown() == report(sound).markdown(), path
    assert {name.split(".")[0] for name in unneeded} == {"setting", "slots", "stage_ms", "system"}
    assert "setting.max_nodes" in unneeded and not any(name.startswith("setting.num") for name in unneeded)

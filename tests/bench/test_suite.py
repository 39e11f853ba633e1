"""The suite: results that hold up, one prefill per scenario, what is there is not run again, tau as simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.progress import Progress as Bar
from tests.backends.playing import words
from tests.bench.published import GPT_OSS_120B, write_config
from tests.checkpoints import write_target
from tests.conftest import tiny_models
from tests.disk import MESSAGE, full_after
from typer.testing import CliRunner

from aquiline.bench.results import result as results_module
from aquiline.bench.results.integrity import differences, problems, recomputed_tau
from aquiline.bench.results.result import read_results, write_result
from aquiline.bench.results.table import report
from aquiline.bench.suite import suite
from aquiline.bench.suite.scenarios import RANDOM, ModelSource, random_config, random_head, random_models
from aquiline.bench.suite.simulated import SimulatedBackend
from aquiline.bench.suite.suite import Progress, run_suite
from aquiline.bench.suite.suite_plan import CPU, Load, Plan
from aquiline.cli.main import app
from aquiline.cli.options import ListCommand
from aquiline.cli.show.results import shown_progress
from aquiline.config import EngineConfig, PairConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.llm import Result as Run
from aquiline.engine.model import Loading
from aquiline.models.counting import assumed_draft, draft_shape_of, shape_of
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft

SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_layers": 2, "num_heads": 4}
BUNDLED_SOURCE = ModelSource(PairConfig("bundled"))
TINY_RANDOM = ModelSource(
    random_config=RANDOM.__class__(**{**RANDOM.__dict__, **SMALL, "num_kv_heads": 2, "head_dim": 16}),
    simulated_tau=2.25,
)


def plan(*loads: Load, **settings: object) -> Plan:
    defaults = {"num_spec_tokens": (1, 3), "adaptive": False, "micro_steps": 24, "measurement_runs": 2}
    return Plan(own_loads=loads, **(defaults | settings))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def committed() -> Iterator[pytest.MonkeyPatch]:
    """These tests may run on source that is in no commit, whose results are measured anew each time."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, committed: pytest.MonkeyPatch) -> Path:
    """Bundled and random loads of every kind, at two temperatures."""
    out = tmp_path_factory.mktemp("results")
    committed.setattr(results_module, "commit", lambda: "0123456789ab")
    loads = (Load("baseline", 128, 1), Load("batch", 64, 3), Load("long", 512, 1, True), Load("long", 192, 2, True))
    progress = Progress()
    whole = plan(*loads, temperatures=(0.0, 0.8), adaptive=True)
    assert len(list(run_suite(whole, BUNDLED_SOURCE, TINY_RANDOM, out, progress))) == 22
    assert progress.skipped == []
    return out


def test_every_result_is_whole_and_tau_follows_from_output_lengths(results: Path) -> None:
    found = read_results(results)
    assert len(found) == 22
    for name, result in found.items():
        assert problems(result) == [], name
        assert recomputed_tau(result) == pytest.approx(result["eagle_speculation"]["mean_acceptance_length"], abs=1e-12)
        assert set(result["output"]["num_tokens"]) == {25}
        assert result["slots"]["num_experts"] == 0 < result["slots"]["num_verify_rows"], name
        assert ("adaptive" in result) == ("roofline" not in result) == name.endswith("adaptive.json")
        assert result["prefill_tokens_per_sec"]["median"] > 0 and result["ttft_ms"]["median"] > 0


def test_settings_compare_with_their_baseline(results: Path) -> None:
    found = read_results(results)
    for name, result in found.items():
        baseline = found[
            name.replace("chain-1", "baseline").replace("chain-3", "baseline").replace("adaptive", "baseline")
        ]
        assert differences(result, baseline) == [], name
        simulated = result["model"]["simulated_tau"]
        if result["model"]["random_weights"]:
            expected = {"baseline": None, "chain-1": 2.0, "chain-3": 2.25}[result["setting"]["name"]]
            assert simulated == expected
            if expected is not None:
                assert result["eagle_speculation"]["mean_acceptance_length"] == pytest.approx(expected, abs=0.15)
        else:
            assert simulated is None
            assert result["output"]["sha256"] == baseline["output"]["sha256"]


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "qwen2"])
def test_a_random_draft_is_a_head_as_they_are_published(family: str, tmp_path: Path) -> None:
    """A dense llama layer, whatever the target's layers have; it writes the target's text."""
    write_target(tmp_path, family)
    config = random_config(str(tmp_path))
    models = random_models(config, Loading("bfloat16", "auto").settled)
    target = shape_of(config)
    assert models.draft_config == random_head(config)
    assert draft_shape_of(random_head(config), target).body == assumed_draft(target).body
    llm = LLM.from_models(models, EngineConfig(max_batch=1, max_context=64), NoDraft())
    texts = [
        llm.run([[5, 6, 7]], SamplingParams(max_tokens=12, ignore_eos=True), drafting=drafting).outputs[0].token_ids
        for drafting in (NoDraft(), Chain(3))
    ]
    assert texts[0] == texts[1]


def test_the_random_draft_of_gpt_oss_has_the_layer_that_limits_assumes(tmp_path: Path) -> None:
    place = write_config(tmp_path, GPT_OSS_120B | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
    layer = random_head(random_config(str(place))).model
    assert (layer.intermediate_size, layer.experts, layer.sinks, layer.windows) == (4 * 2880, None, False, ())
    assert not (layer.qkv_bias or layer.o_bias or layer.mlp_bias or layer.qk_norm)


def test_what_is_there_is_not_run_again(results: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in results.glob("*.json")}
    load = Load("baseline", 128, 1)
    list(run_suite(plan(load), BUNDLED_SOURCE, TINY_RANDOM, results, Progress()))
    assert {file: file.stat().st_mtime_ns for file in results.glob("*.json")} == before
    (torn,) = results.glob("*baseline-128x1-t0-chain-3.json")
    torn.write_text(torn.read_text()[:100])
    again = list(run_suite(plan(load), BUNDLED_SOURCE, TINY_RANDOM, results, Progress()))
    assert len(again) == 3 and problems(json.loads(torn.read_text())) == []


def test_results_of_uncommitted_changes_are_measured_again(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_module, "commit", lambda: "0123456789ab-dirty")
    load = Load("baseline", 32, 1)
    for _ in range(2):
        list(run_suite(plan(load, micro_steps=4), BUNDLED_SOURCE, TINY_RANDOM, tmp_path, Progress()))
        (file,) = tmp_path.glob("*-baseline.json")
        file.write_text(file.read_text().replace('"date": "', '"date": "noted, '))
    assert file.read_text().count("noted") == 1, "taken over from the run before"
    assert "UNCOMMITTED CHANGES" in report(read_results(tmp_path)).markdown()
    assert "UNCOMMITTED" not in report(read_results(results)).markdown()


def test_a_full_disk_is_named_and_leaves_the_results_before_it(results: Path, tmp_path: Path) -> None:
    file = sorted(results.glob("*.json"))[0]
    result = json.loads(file.read_text())
    write_result(result, tmp_path / "first.json")
    with full_after(1000), pytest.raises(OSError, match=rf"second\.json: {MESSAGE}\. Results before it are whole"):
        write_result(result, tmp_path / "second.json")
    assert [p.name for p in tmp_path.iterdir()] == ["first.json"]


def test_every_round_begins_with_another_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    decode = suite.LoadRun._decode

    def noted(self: suite.LoadRun, llm: LLM, prompts: list[list[int]], drafting: Drafting) -> Run:
        order.append(drafting.max_depth)
        return decode(self, llm, prompts, drafting)

    monkeypatch.setattr(suite.LoadRun, "_decode", noted)
    list(run_suite(plan(Load("small", 32, 1), micro_steps=4), BUNDLED_SOURCE, TINY_RANDOM, tmp_path, Progress()))
    assert order == [0, 1, 3, 1, 3, 0, 3, 0, 1], "one warm-up round and two that are measured"


def test_speed_is_the_wall_clocks(results: Path) -> None:
    """Sequences of n tokens each: batch * (n - 1) tokens between the first of all and the last."""
    for name, found in read_results(results).items():
        batch, rates = found["scenario"]["batch"], found["throughput_tokens_per_sec"]["values"]
        for rate, between in zip(rates, found["itl_ms"]["values"], strict=True):
            if batch == 1:
                assert rate == pytest.approx(1e3 / between), name
            else:
                assert rate <= batch / between * 1e3, "the batch's span holds each sequence's"


def test_what_cannot_run_is_named_and_the_rest_runs(tmp_path: Path) -> None:
    progress = Progress()
    loads = (Load("huge", 100_000, 1), Load("small", 64, 1))
    found = list(run_suite(plan(*loads), BUNDLED_SOURCE, TINY_RANDOM, tmp_path, progress))
    assert len(found) == 3 and len(progress.skipped) == 1
    assert "huge 100000 x 1: max_context=100025: the model was built for 4096" in progress.skipped[0]


@pytest.mark.parametrize("tau", [1.0, 1.3, 2.5, 3.0, 4.0, 9.0])
def test_simulated_tau_is_met_and_the_text_is_plain_decodings(tau: float) -> None:
    llm = LLM.from_models(tiny_models(), EngineConfig(max_batch=3))
    llm.engine.backend = SimulatedBackend(llm.engine.backend, tau, llm.models.vocab_size)
    prompts = [words(9, seed) for seed in range(3)]
    sampling = SamplingParams(max_tokens=90, temperature=0.7, seed=5, ignore_eos=True)
    plain = llm.run(prompts, sampling, drafting=NoDraft())
    run = llm.run(prompts, sampling, drafting=Chain(3))
    assert [o.token_ids for o in run.outputs] == [o.token_ids for o in plain.outputs]
    assert run.summary.counters.tau == pytest.approx(min(tau, 4), abs=0.15)
    assert plain.summary.counters.tau == 1


def test_a_bar_does_not_stand_at_nothing_while_a_model_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Bar] = []
    monkeypatch.setattr(Bar, "start", lambda self: bars.append(self))
    with shown_progress() as (progress, _):
        progress.start("single", 7)
        (task,) = bars[0].tasks
        assert task.total is None, "it moves to and fro"
        progress.advance()
        assert (task.total, task.completed) == (7, 1)


def test_simulated_tau_that_cannot_be() -> None:
    llm = LLM.from_models(tiny_models(), EngineConfig(max_batch=1))
    with pytest.raises(ValueError, match=r"simulate_tau=0\.5"):
        SimulatedBackend(llm.engine.backend, 0.5, 96)
    llm.engine.backend = SimulatedBackend(llm.engine.backend, 2.0, 96)
    with pytest.raises(ValueError, match="drafter='dynamic': acceptance is simulated for chains"):
        llm.run([words(9)], SamplingParams(max_tokens=4), drafting=Dynamic())


def test_the_command(tmp_path: Path) -> None:
    args = [
        "bench",
        "--target",
        "bundled",
        "--out",
        str(tmp_path),
        "--contexts",
        "64",
        "128",
        "--num-spec-tokens",
        "2",
        "--micro-steps",
        "8",
        "--no-adaptive",
    ]
    args += ["--measurement-runs", "1", "--warmup-runs", "0"]
    shown = CliRunner().invoke(app, args)
    assert shown.exit_code == 0, shown.output
    assert len(list(tmp_path.glob("*.json"))) == 4 and "custom 128 x 1, t=0, chain-2" in shown.output
    assert len(json.loads(CliRunner().invoke(app, [*args, "--json"]).stdout)) == 4
    for bad, reason in (
        (["--scenario", "none-such"], "must be of baseline, single"),
        (["--profile", "gpu"], "must be one of full, cpu"),
        (["--simulate-tau", "2"], "goes with --random-weights"),
    ):
        refused = CliRunner().invoke(app, ["bench", "--out", str(tmp_path), *bad])
        assert refused.exit_code == 2 and reason in refused.stderr, refused.output


def test_the_profiles_cover_the_mission() -> None:
    assert {load.name for load in CPU} >= {"baseline", "single", "batch", "large-context", "stress"}
    assert {load.context for load in CPU if load.is_random} == {8192, 16384, 32768, 65536}


def test_list_options_take_values_in_a_row() -> None:
    import typer

    app = typer.Typer()
    seen: dict[str, object] = {}

    @app.command(cls=ListCommand)
    def command(path: str, a: list[int] | None = typer.Option(None), b: str = "x") -> None:
        seen.update(path=path, a=a, b=b)

    for args in (["here", "--a", "1", "2", "3", "--b", "y"], ["--b", "y", "here", "--a", "1", "--a", "2", "3"]):
        assert CliRunner().invoke(app, args).exit_code == 0
        assert seen == {"path": "here", "a": [1, 2, 3], "b": "y"}

"""`aquiline compare` as a user types it: transformers for real, absent peers named, a peer of other weights void."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoints import write_draft, write_target
from typer.testing import CliRunner, Result

from aquiline.bench.peers import transformers as peer_module
from aquiline.bench.peers.comparison import compare, plan_of
from aquiline.bench.peers.contest import Contest
from aquiline.bench.peers.peer import PeerSetup
from aquiline.bench.results.result import commit, read_results
from aquiline.cli.main import app
from aquiline.config import PairConfig
from aquiline.models.load import read_model_config

CLOSED = "openai:http://127.0.0.1:9/v1#small"  # the discard port, where nothing listens
SIZE = ("--prompt-tokens", 24, "--new-tokens", 16, "--repeats", 2)
HELP = """
import sys
from aquiline.cli.main import app
try:
    app()
finally:
    heavy = {"torch", "transformers", "numpy", "openvino", "llama_cpp"} & set(sys.modules)
    assert not heavy, heavy
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.utils._cache_assets.HF_ASSETS_CACHE", str(tmp_path / "assets"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    write_target(root / "target")
    write_draft(root / "draft", read_model_config(root / "target"))
    return root


def run(*args: object) -> Result:
    return CliRunner().invoke(app, ["compare", *(str(arg) for arg in args)])


def refused(result: Result) -> str:
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), (result.output, result.exception)
    assert result.stderr.splitlines()[-1].startswith("aquiline: ") and not result.stdout
    return result.stderr


def test_help_waits_for_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", HELP, "compare", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.replace("│", " ").split())
    assert "aquiline compare --random-weights llama-230m" in shown and "pip install 'aquiline[peers]'" in shown


@pytest.mark.rare
def test_a_pair_against_transformers(pair: Path, tmp_path: Path) -> None:
    pair_options = ("--target", pair / "target", "--draft", pair / "draft", "--num-spec-tokens", 2, 3)
    peers = ("--peer", "transformers:f32", "transformers:f32:lookup", CLOSED)
    done = run(*pair_options, *peers, *SIZE, "--json", "--out", tmp_path / "out")
    assert done.exit_code == 0, (done.stderr, done.exception)
    data = json.loads(done.stdout)
    labels = ["aquiline baseline", "aquiline chain-2", "aquiline chain-3", "aquiline tree",
              "transformers f32", "transformers f32 lookup"]  # fmt: skip
    assert [row["label"] for row in data["rows"]] == labels
    for row in data["rows"]:
        assert row["void"] == "" and row["agreed"] == 16 and row["tau"] >= 1 and len(row["tokens_per_s"]) == 2
        assert row["is_speculative"] == (row["label"].split()[-1] not in ("baseline", "f32"))
    assert data["agreed_in_float32"] == {"transformers": [16, 16, 16]}
    assert data["rows"][0]["over_baseline"]["value"] == 1 and data["rows"][0]["low"] is None, "two rounds"
    assert list(data["moved_gb_per_s"]) == ["aquiline baseline"]
    assert data["moved_gb_per_s"]["aquiline baseline"]["moved"] > 0 and data["rows"][0]["tokens_per_s"]
    assert list(data["absent"]) == [CLOSED.replace(":", " ", 1)] and "cannot be reached" in data["absent"].popitem()[1]
    assert len(data["verdict"]) == 2 and "x the fastest of 2 peer settings, transformers f32" in data["verdict"][1]
    assert "of all: aquiline " in data["verdict"][1] and "(the fastest of 3 settings, " in data["verdict"][1]
    found = read_results(tmp_path / "out")
    names = {result["setting"]["name"] for result in found.values()}
    assert names == {label.removeprefix("aquiline ") for label in labels} and len(found) == len(labels)
    assert {result["engine"] for result in found.values()} == {"aquiline", "transformers"}
    assert len({result["scenario"]["prompts_sha256"] for result in found.values()}) == 1
    assert len({tuple(result["output"]["num_tokens"]) for result in found.values()}) == 1
    assert len({result["system"]["threads"] for result in found.values()}) == 1
    assert found["transformers-f32.json"]["output"]["sha256"] == found["aquiline-baseline.json"]["output"]["sha256"]


def test_the_table_says_who_is_faster_and_what_is_absent(pair: Path) -> None:
    done = run("--target", pair / "target", "--peer", "transformers:f32", CLOSED, *SIZE)
    assert done.exit_code == 0, (done.stderr, done.exception)
    text = " ".join(done.stdout.split())
    assert "aquiline baseline moves" in text and "plain reads reach" in text
    assert "transformers: 16, 16, 16 of 16 first tokens in float32 are ours, prompt by prompt" in text
    assert ("uncommitted changes: nobody can measure this again" in text) == commit().endswith("-dirty")
    assert "not run: openai http://127.0.0.1:9/v1#small:" in text
    assert "without drafting: aquiline baseline" in text and "void" not in text.lower()


def test_random_weights_run_without_a_draft(pair: Path) -> None:
    config = pair / "target" / "config.json"
    done = run("--random-weights", config, "--peer", "transformers:f32", *SIZE, "--json")
    assert done.exit_code == 0, (done.stderr, done.exception)
    data = json.loads(done.stdout)
    assert [row["label"] for row in data["rows"]] == ["aquiline baseline", "transformers f32"]
    assert data["rows"][1]["agreed"] >= 8 and data["rows"][0]["weights"] == "bfloat16"


@pytest.mark.rare
def test_drawn_text_is_compared_among_ours_only(pair: Path) -> None:
    options = ("--target", pair / "target", "--draft", pair / "draft", "--temperature", 1, "--peer", "transformers:f32")
    options += ("--num-spec-tokens", 3)
    data = json.loads(run(*options, *SIZE, "--json").stdout)
    assert [row["agreed"] for row in data["rows"]] == [16, 16, 16, None]


def test_a_peer_that_runs_another_model_is_void(pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_target(tmp_path / "other", seed=5)
    real = peer_module.open_peer
    swap: Any = lambda spec, place: real(spec, PeerSetup(tmp_path / "other", None, place.threads, place.max_context))  # noqa: E731
    monkeypatch.setattr(peer_module, "open_peer", swap)
    plan = plan_of(
        Contest(peer=("transformers:f32",), prompt_tokens=24, new_tokens=12, repeats=1),
        PairConfig(target=str(pair / "target")),
    )
    found = compare(plan)
    assert len(found.checks["transformers"].counts) == 3, "as many prompts as ever, though one is measured"
    assert min(found.checks["transformers"].counts) < 8
    assert found.rows[1].void.startswith("it computes another model: only ")
    assert found.verdict == ["no peer to compare with"]


def test_every_round_begins_with_another_setting(pair: Path) -> None:
    """And all are timed alike: from the first token to the last by the wall clock."""
    told: list[str] = []
    plan = plan_of(
        Contest(peer=("transformers:f32", "transformers:f32:eager"), prompt_tokens=24, new_tokens=12, repeats=3),
        PairConfig(target=str(pair / "target")),
    )
    found = compare(plan, told.append)
    own, plain, eager = "aquiline baseline", "transformers f32", "transformers f32 eager"
    order = [line.partition(": ")[2] for line in told if line.startswith("run ")]
    assert order == [own, plain, eager, plain, eager, own, eager, own, plain]
    for result in found.results:
        rates, between = result["throughput_tokens_per_sec"]["values"], result["itl_ms"]["values"]
        assert rates == pytest.approx([1e3 / ms for ms in between])


def test_no_engine_has_seen_what_it_is_measured_on(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    real = peer_module.TransformersPeer.generate

    def note(self: Any, prompts: list[list[int]], new_tokens: int, temperature: float) -> Any:
        if new_tokens == 12:
            seen.append(tuple(prompts[0]))
        return real(self, prompts, new_tokens, temperature)

    monkeypatch.setattr(peer_module.TransformersPeer, "generate", note)
    plan = plan_of(
        Contest(peer=("transformers:f32",), prompt_tokens=24, new_tokens=12, repeats=3),
        PairConfig(target=str(pair / "target")),
    )
    compare(plan)
    assert len(seen) == len(set(seen)) == 4 and {len(prompt) for prompt in seen} == {24}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--peer", "vllm"], "peer='vllm'"),
        (["--peer", CLOSED], "no peer can run: peer openai"),
        (["--draft", "somewhere"], "draft='somewhere': needs --target"),
        (["--random-weights", "llama-230m", "--target", "x"], "leave --target and --draft out"),
        (["--random-weights", "nothing"], "random_weights='nothing'"),
        (["--prompt-tokens", 0], "prompt_tokens=0: must be at least 1"),
        (["--new-tokens", 1], "new_tokens=1: must be at least 2"),
        (["--repeats", 0], "repeats=0: must be at least 1"),
        (["--num-spec-tokens", 17], "num_spec_tokens=17: must be between 1 and 16"),
        (["--temperature", -1], "temperature=-1.0: must be 0 (greedy)"),
    ],
    ids=str,
)
def test_bad_options_are_named(options: list[object], named: str) -> None:
    small = [] if {"--prompt-tokens", "--new-tokens", "--repeats"} & set(options) else SIZE
    assert named in refused(run(*options, *small))


@pytest.mark.parametrize("options", [("--num-spec-tokens", 17), ("--temperature", -1), ("--prompt-tokens", 0)], ids=str)
def test_bad_work_is_refused_before_anything_is_loaded(
    options: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object, **__: object) -> None:
        raise AssertionError("something was loaded")

    monkeypatch.setattr("aquiline.bench.peers.comparison.LLM", loaded)
    monkeypatch.setattr(peer_module, "open_peer", loaded)
    refused(run("--target", "bundled", "--peer", "transformers", *options))


@pytest.mark.skipif(torch.cpu._is_avx512_bf16_supported(), reason="this CPU has bfloat16 instructions")
def test_bf16_arithmetic_is_refused_where_the_cpu_has_none(pair: Path) -> None:
    options = ("--target", pair / "target", "--peer", "transformers:f32", "--bf16-arithmetic")
    assert "arithmetic='bfloat16'" in refused(run(*options, *SIZE))

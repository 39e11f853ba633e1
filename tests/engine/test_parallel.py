"""A pair that several processes share gives the text and the bits of one process, and ends when one of them does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import engine_config, needs_native
from typer.testing import CliRunner

from aquiline.backends.torch.parallel import ParallelPair, refuse_device
from aquiline.cli.main import app
from aquiline.config import EngineConfig, Environment, PairConfig, ParallelMode, SamplingParams
from aquiline.engine.llm import LLM, Result
from aquiline.engine.model import LoadedModels, Loading, ResolvedPair, load_models
from aquiline.errors import RankError
from aquiline.models.draft_config import DraftOverrides
from aquiline.models.load import read_model_config
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
from aquiline.spec.lookup import Lookup

pytestmark = pytest.mark.rare

V = 160
PROMPTS = [[7, 8, 9, 7, 8, 9, 7, 8], list(range(3, 40)), [5], list(range(3, 36)) + [7, 7], [11, 12] * 9]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True, seed=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": replace(GREEDY, temperature=0.9, seed=4),
    "filtered": replace(GREEDY, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01, seed=5),
    "penalised": replace(
        GREEDY, temperature=0.7, seed=6, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={5: 2.0, 7: -3.0}
    ),
    "logprobs": replace(GREEDY, temperature=0.8, seed=7, logprobs=V, prompt_logprobs=V),
}
DRAFTINGS: dict[str, Drafting] = {
    "plain": NoDraft(), "chain": Chain(3), "static": Static(), "dynamic": Dynamic(depth=3, top_k=3, num_nodes=12),
    "adaptive": Adaptive(), "lookup": Lookup(),
}  # fmt: skip


def write_pair(place: Path, kv_heads: int = 6, heads: int = 12) -> Path:
    write_target(
        place / "target", num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=96,
        hidden_size=8 * heads, tie_word_embeddings=True, num_hidden_layers=3,
    )  # fmt: skip
    config = read_model_config(place / "target")
    write_draft(place / "draft", config, num_attention_heads=6, num_key_value_heads=kv_heads)
    return place


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp("pair"))


def load(pair: Path, num_ranks: int, dtype: str = "float32", mode: ParallelMode = "gather") -> LoadedModels:
    overrides = DraftOverrides(capture=(0, 1, 2))
    how = Loading(dtype, device="torch", tensor_parallel_size=num_ranks, parallel_mode=mode, overrides=overrides)
    return load_models(pair / "target", pair / "draft", how, Environment.read())


def children() -> list[psutil.Process]:
    """The processes of ranks that this process has started."""
    found = psutil.Process().children(recursive=True)
    return [child for child in found if any("parallel import follow" in word for word in child.cmdline())]


def facts(result: Result) -> list[Any]:
    """Texts, who wrote each token, and log-probabilities as they are."""
    return [(o.token_ids, o.sources, o.logprobs, o.prompt_logprobs, o.finish_reason) for o in result.outputs]


def everything(models: LoadedModels) -> dict[str, Any]:
    """What the models give in every way to draft and to sample, one way a run and mixed, with preemptions and hits of
    the prefix cache, and what the target computes at every position, as bytes."""
    found: dict[str, Any] = {}
    with LLM.from_models(models, engine_config(max_batch=3)) as llm:
        for name, drafting in DRAFTINGS.items():
            sampling = list(SAMPLINGS.values())
            found[f"mixed {name}"] = facts(llm.run(PROMPTS, sampling, drafting=drafting))
        for name in ("filtered", "logprobs"):
            found[name] = facts(llm.run(PROMPTS[:3], SAMPLINGS[name], drafting=Dynamic(2, 3, 8)))
        for prompt, drafting in zip(PROMPTS, DRAFTINGS.values(), strict=False):
            llm.engine.add(llm.request(f"{drafting.name}", prompt, SAMPLINGS["sampled"], drafting))
        together = [(d.request_id, d.token_ids) for _ in range(200) if llm.engine.is_busy for d in llm.engine.step()]
        found["draftings together"] = together
        documents = [np.array(prompt, np.int32) for prompt in PROMPTS[:3]]
        found["scored"] = [part.tobytes() for part in llm.engine.backend.score(documents)]
    few = EngineConfig(max_batch=3, page_size=16, num_pages=12, max_context=128, calibration=False, row_budget=20)
    with LLM.from_models(models, few) as llm:
        longer = [replace(sampling, max_tokens=80) for sampling in SAMPLINGS.values()]
        runs = [llm.run(PROMPTS, longer, drafting=Chain(3)) for _ in range(2)]
        found["few pages"] = [facts(run) for run in runs]
        found["preemptions and hits"] = llm.engine.meter.num_preemptions, runs[1].summary.counters.num_prefix_hits
    return found


@pytest.fixture(scope="module")
def alone(pair: Path) -> dict[str, Any]:
    return everything(load(pair, 1))


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_ranks_give_the_texts_and_the_bits_of_one(pair: Path, alone: dict[str, Any], num_ranks: int) -> None:
    models = load(pair, num_ranks)
    try:
        assert (models.system()["ranks"], models.system()["parallel_mode"]) == (num_ranks, "gather")
        assert len(children()) == num_ranks - 1
        found = everything(models)
    finally:
        models.pair.close()
    assert children() == []
    for name, value in alone.items():
        assert found[name] == value, name
    num_preemptions, num_hits = alone["preemptions and hits"]
    assert num_preemptions > 0 and num_hits > 0
    drafted = {
        name: sum(s != "target" for _, sources, *_ in alone[f"mixed {name}"] for s in sources) for name in DRAFTINGS
    }
    assert drafted["plain"] == 0 and drafted["chain"] > 0 and drafted["lookup"] > 0


def test_two_ranks_cannot_share_three_key_heads(tmp_path: Path) -> None:
    """The geometry of SmolLM2: nine heads of queries, three of keys."""
    place = write_pair(tmp_path, kv_heads=3, heads=9)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=2: the target has num_key_value_heads=3.*; the draft has"
    ):
        load(place, 2)
    assert children() == []


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_three_ranks_share_three_key_heads_or_copy_one(tmp_path: Path, kv_heads: int) -> None:
    place, texts, kv_bytes = write_pair(tmp_path, kv_heads, heads=9), [], []
    for num_ranks in (1, 3):
        models = load(place, num_ranks, "bfloat16")
        with LLM.from_models(models, engine_config()) as llm:
            texts.append(facts(llm.run(PROMPTS, list(SAMPLINGS.values()), drafting=Chain(3))))
        kv_bytes.append(models.pair.kv_bytes_per_token()[0])
        models.pair.close()
    assert texts[0] == texts[1]
    assert kv_bytes[1] == kv_bytes[0] * 3 // kv_heads, "of all ranks together"


def test_sums_over_ranks_are_asked_for_by_name_and_results_say_so(pair: Path) -> None:
    """Texts may differ from those of one rank, their first log-probabilities hardly."""
    found, asked = [], replace(SAMPLINGS["logprobs"], temperature=0.0, prompt_logprobs=None)
    for num_ranks in (1, 2):
        models = load(pair, num_ranks, mode="reduce")
        with LLM.from_models(models, engine_config()) as llm:
            outputs = [run.outputs[0] for run in (llm.run([p], asked, drafting=Chain(3)) for p in PROMPTS)]
        models.pair.close()
        found.append([output.logprobs[0].top for output in outputs if output.logprobs])
        assert all(len(output.token_ids) == 16 for output in outputs)
    assert (models.system()["ranks"], models.system()["parallel_mode"]) == (2, "reduce")
    exact, near = found
    assert len(near) == len(exact) == len(PROMPTS) and near != exact
    for a, b in zip(near, exact, strict=True):
        assert a == pytest.approx(b, abs=1e-4)


def test_what_ranks_cannot_do_is_refused_by_name(pair: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="parallel_mode='sum': must be one of gather, reduce"):
        PairConfig(parallel_mode="sum")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="parallel_mode='reduce': splits the inputs that a scale of dtype='int8' is of"
    ):
        load(pair, 2, "int8", "reduce")
    for device in ("cuda", "cuda:1"):
        with pytest.raises(
            ValueError, match=f"tensor_parallel_size=99, device='{device}': ranks run on CPUs .* GPUs here"
        ):
            refuse_device(99, device)
    assert children() == []
    load(pair, 1, mode="reduce")
    assert "parallel_mode='reduce' has no effect: one rank" in caplog.text


def test_sums_over_ranks_are_part_of_what_results_depend_on(pair: Path) -> None:
    config = PairConfig(str(pair / "target"), device="torch", tensor_parallel_size=2)
    gathered, summed = (
        ResolvedPair.of(each).identity(NoDraft()) for each in (config, replace(config, parallel_mode="reduce"))
    )
    assert summed == gathered | {"parallel_mode": "reduce", "ranks": "2"}
    assert gathered == ResolvedPair.of(replace(config, tensor_parallel_size=1)).identity(NoDraft())


@pytest.fixture
def running(pair: Path) -> Iterator[LLM]:
    """An LLM on three ranks in the middle of two texts."""
    with LLM(
        pair / "target", pair / "draft", dtype="float32", device="torch", tensor_parallel_size=3,
        engine=engine_config(), drafting=Chain(3), capture=(0, 1, 2),
    ) as llm:  # fmt: skip
        for name in ("a", "b"):
            llm.engine.add(llm.request(name, PROMPTS[1], replace(SAMPLINGS["sampled"], max_tokens=200)))
        for _ in range(6):
            llm.engine.step()
        yield llm
    assert children() == []


def process_of(llm: LLM, rank: int) -> psutil.Process:
    pair = llm.models.pair
    assert isinstance(pair, ParallelPair)
    return psutil.Process(pair.team.processes[rank].pid)


def check_error(llm: LLM, pattern: str) -> None:
    """The step fails with this error within ten seconds, every process is gone, and later steps say the same."""
    began = time.monotonic()
    with pytest.raises(RankError, match=pattern):
        for _ in range(50):
            llm.engine.step()
    assert time.monotonic() - began < 10
    assert children() == []
    with pytest.raises(RankError, match=pattern):
        llm.engine.step()


def test_a_rank_that_is_killed_ends_all_by_name(running: LLM) -> None:
    process_of(running, 2).kill()
    check_error(running, r"rank 2 has died \(exit code -9\)")


def test_a_rank_that_hangs_ends_all_by_name(running: LLM) -> None:
    process_of(running, 1).suspend()
    check_error(running, r"^rank 1 has not answered for 8.5 s")


def test_a_rank_that_is_late_is_waited_for_up_to_the_limit(running: LLM) -> None:
    late = process_of(running, 1)
    late.suspend()
    threading.Timer(2.0, late.resume).start()
    began = time.monotonic()
    running.engine.step()
    running.engine.step()
    assert time.monotonic() - began > 1.5
    late.suspend()
    timer = threading.Timer(9.5, late.resume)  # it is gone by then
    timer.start()
    check_error(running, r"^rank 1 has not answered")
    timer.cancel()


def test_close_waits_for_the_ends_of_all(running: LLM) -> None:
    processes = [process_of(running, rank) for rank in (1, 2)]
    running.close()
    assert not any(process.is_running() for process in processes)
    with pytest.raises(RankError, match="were closed"):
        running.models.pair.open(running.engine.backend._own.sizes)  # type: ignore[attr-defined]


def test_a_rank_whose_rows_are_broken_is_named(pair: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Each rank reads its own rows alone: rank 0 does not see what is wrong with those of rank 1."""
    for part in ("target", "draft"):
        (tmp_path / part).mkdir()
        for file in (pair / part).iterdir():
            (tmp_path / part / file.name).write_bytes(file.read_bytes())
    file = tmp_path / "target" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.2.mlp.down_proj.weight"][-1, 3] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(RankError, match=r"rank 1 has died \(exit code 1\); see its output"):
        load(tmp_path, 2)
    assert children() == []
    assert "model.layers.2.mlp.down_proj.weight holds 1 of" in capfd.readouterr().err


def test_no_rank_outlives_rank_0(pair: Path) -> None:
    code = (
        "import sys, time; from tests.engine.test_parallel import *; models = load(Path(sys.argv[1]), 3);"
        "print(*(child.pid for child in children()), flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(pair)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert first.stdout is not None
    pids = [int(pid) for pid in first.stdout.readline().split()]
    assert len(pids) == 2
    first.send_signal(signal.SIGKILL)
    first.wait()
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids):
        assert time.monotonic() < deadline, "a rank runs on"
        time.sleep(0.05)


@needs_native
def test_the_native_library_runs_on_one_rank(pair: Path) -> None:
    with pytest.raises(
        ValueError, match="tensor_parallel_size=2: the native library runs on one rank; use device='torch'"
    ):
        LLM(pair / "target", tensor_parallel_size=2)


def test_a_command_on_two_ranks_writes_what_it_writes_on_one() -> None:
    """Who drafted a token depends on what steps take; on one rank nobody does."""
    asked = ["generate", "--prompt", "def f(x):", "--target", "bundled", "--seed", "3", "--device", "torch"]
    asked += ["--max-tokens", "12", "--temperature", "0.8", "--json"]
    alone = CliRunner().invoke(app, [*asked, "--drafter", "none"])
    assert alone.exit_code == 0, alone.output
    command = [sys.executable, "-c", "from aquiline.cli.main import app; app()", *asked, "--tensor-parallel-size", "2"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    one, two = json.loads(alone.stdout), json.loads(done.stdout)
    texts = [run["outputs"][0]["token_ids"] for run in (one, two)]
    assert texts[0] == texts[1] and len(texts[0]) == 12
    assert (two["system"]["ranks"], two["system"]["parallel_mode"]) == (2, "gather") and "ranks" not in one["system"]

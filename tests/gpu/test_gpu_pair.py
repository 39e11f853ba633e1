"""What a pair on a GPU is, and what it refuses by name; an engine over it, read late."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from tests.backends.playing import words
from tests.conftest import engine_config, weights_of
from tests.gpu.pairs import MINI, backend_of, gpu_pair, new_gpu, new_player, twin_pair, weights
from tests.gpu.running import DEVICE, IS_INTERPRETED

from aquiline.backends import choose
from aquiline.backends.base import Sizes
from aquiline.backends.gpu import gpu_pair as module
from aquiline.backends.gpu.gpu_pair import GpuPair, check_device
from aquiline.backends.torch.decoder import Decoder
from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.parity.observe import view_of
from aquiline.spec.drafting import Chain, NoDraft


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dtype": "int8"}, "dtype='int8': on a GPU must be one of bfloat16, float16, float32"),
        ({"dtype": "float32", "draft_dtype": "int4"}, "draft_dtype='int4': on a GPU must be one of"),
        ({"dtype": "float32", "kv_dtype": "int8"}, "kv_dtype='int8': on a GPU keys are stored as weights are"),
        ({"dtype": "float32", "device": "tpu"}, "device='tpu': the kernels run on CUDA devices"),
    ],
    ids=["dtype", "draft dtype", "kv dtype", "device"],
)
def test_settings_that_it_does_not_have(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GpuPair(*weights(), **{"device": str(DEVICE), **settings})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"head_dim": 24, "hidden_size": 48}, "head_dim=24 has no kernel"),
    ],
    ids=["head size"],
)
def test_targets_that_have_no_kernels(change: dict[str, Any], problem: str) -> None:
    target, _ = weights_of(Decoder(dataclasses.replace(MINI, **change)), None)
    with pytest.raises(ValueError, match=problem):
        GpuPair(target, None, "float32", device=str(DEVICE))


def test_devices_that_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda:1': torch has no CUDA device here; use device='cpu'"):
        check_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"device='cuda': has compute capability 7\.5, and 8\.0 is needed"):
        check_device("cuda")
    monkeypatch.setattr(module, "IS_INTERPRETED", False)
    with pytest.raises(ValueError, match="device='cpu': the kernels run on CUDA devices"):
        check_device("cpu")


def test_it_is_chosen_by_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings go to it, and nothing else runs where it cannot."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "GpuPair", lambda *settings: seen.append(settings))
    environment, own = Environment.read(), weights()
    choose.new_pair(*own, "float16", "auto", "auto", "cuda:1", environment, "float32")
    assert seen == [(*own, "float16", "auto", "cuda:1", "float32")]
    with pytest.raises(ValueError, match="arithmetic='int8': a GPU multiplies weights as they are stored"):
        choose.new_pair(*own, "float16", "int8", "auto", "cuda", environment)
    how = choose.path_of("cuda", "auto", "auto", "bfloat16", environment)
    assert how == {"path": "gpu", "arithmetic": "bfloat16", "kv_dtype": "bfloat16"}


def test_what_it_says_of_itself() -> None:
    pair = gpu_pair()
    assert pair.kv_bytes_per_token() == (2 * 2 * 16 * 4, 2 * 16 * 4 + 32 * 4) and pair.free_bytes() > 0
    assert pair.is_exact and pair.system()["gpu"] == (
        "Triton's interpreter" if IS_INTERPRETED else pair.system()["gpu"]
    )


def test_stages_that_are_not_seen() -> None:
    with pytest.raises(ValueError, match="device='cuda': stages are seen on a CPU alone"):
        view_of(gpu_pair(), Sizes(1, 4, 16, 4, 16))


def test_memory_that_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(module, "GpuBackend", full)
    with pytest.raises(module.OutOfMemory, match="lower cache_fraction or num_pages: no room"):
        new_player(gpu_pair())
    monkeypatch.setattr(module.DeviceModel, "of", full)
    with pytest.raises(module.OutOfMemory, match="the weights do not fit into the memory of"):
        new_gpu()


@pytest.mark.rare
def test_an_engine_reads_late_and_writes_the_twins_text() -> None:
    """Programs that are issued before the last outcome was read, slots that end and are taken again."""
    params = [
        SamplingParams(max_tokens=n, ignore_eos=True, temperature=t, seed=n) for n, t in ((3, 0.0), (5, 1.0), (2, 2))
    ]
    prompts, found = [words(4, 1), words(6, 2), words(3, 3)], []
    for pair in (gpu_pair(), twin_pair()):
        llm = LLM.from_models(LoadedModels(pair, None, "float32", 0), engine_config(2, 16, page_size=16))
        assert llm.engine.pipeline.is_late
        found.append([llm.run(prompts, params, drafting=way) for way in (Chain(2), NoDraft())])
    texts = [[output.token_ids for output in run.outputs] for runs in found for run in runs]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert found[0][0].summary.counters.num_accepted_tokens == found[1][0].summary.counters.num_accepted_tokens


@pytest.mark.rare
def test_weights_in_sixteen_bits() -> None:
    """Stored in float16, which the interpreter has too: the text is one that the exact order of sums gives again."""
    texts = []
    for way in (Chain(2), NoDraft()):
        player = new_player(new_gpu(dtype="float16"))
        text = player.add(words(5, 2), way, SamplingParams(max_tokens=9, seed=1), chunk=5)
        player.run(4)
        assert backend_of(player).storage.k.dtype == torch.float16
        texts.append(text.output[:4])
    assert texts[0] == texts[1]

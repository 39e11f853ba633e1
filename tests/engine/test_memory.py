"""The memory plan: what is said is what is there, and what does not fit is refused with the numbers."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from tests.checkpoints import write_target
from tests.conftest import TINY, TINY_DRAFT, engine_config, needs_native, tiny_llm, tiny_models
from tests.engine.storage import native

from aquiline.config import EngineConfig
from aquiline.engine.engine import Engine
from aquiline.engine.llm import LLM
from aquiline.errors import OutOfMemory


@needs_native
def test_the_plan_counts_what_the_tensors_hold() -> None:
    engine = tiny_llm("bfloat16").engine
    plan, backend = engine.memory, native(engine)
    groups = (backend.kv, backend.draft_kv)
    assert plan.kv_bytes == sum(group.k.nbytes + group.v.nbytes for group in groups) + backend.fused.nbytes
    draft = TINY_DRAFT.model
    assert plan.target_kv_bytes_per_token == 2 * TINY.num_layers * TINY.num_kv_heads * TINY.head_dim * 2
    fused = 4 * draft.hidden_size
    assert plan.draft_kv_bytes_per_token == 2 * draft.num_kv_heads * draft.head_dim * 2 + fused
    assert f"KV {plan.kv_bytes_per_token} bytes per token" in str(plan)
    assert plan.as_dict()["num_pages"] == engine.pool.num_pages


@pytest.mark.parametrize("fraction", [0.5, 0.75, 0.9])
def test_the_cache_fraction_bounds_the_pages(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 3_000_000
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": free}))
    models = tiny_models()
    config = EngineConfig(max_batch=64, page_size=16, cache_fraction=fraction)
    engine = Engine(models, config)
    assert fraction * free - engine.memory.kv_bytes_per_token * 16 < engine.memory.kv_bytes <= fraction * free


def test_no_page_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(OutOfMemory, match=r"cache_fraction=0.5: a page of 16 tokens takes 0.000 GB"):
        Engine(tiny_models(), engine_config())


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_target(tmp_path, "llama")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(OutOfMemory, match=r"GB of weights as float32 take [0-9.]+ GB while"):
        LLM(tmp_path, dtype="float32")

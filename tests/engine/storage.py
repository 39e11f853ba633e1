"""What an engine over the native backend has stored: keys, values and features of its pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from aquiline.backends.base import StepInput
from aquiline.engine.engine import Engine
from aquiline.engine.llm import LLM
from aquiline.types import KVGroup


def native(engine: Engine) -> Any:
    """The native backend that the engine runs on, taught or not."""
    backend = engine.backend
    return getattr(backend, "inner", backend)


def keys_and_values(kv: KVGroup, pages: list[int], first: int, end: int) -> list[np.ndarray]:
    """Those of KV indices [first, end) of whoever has these pages."""
    index = np.arange(first, end)
    page, place = np.array(pages)[index // kv.page_size], index % kv.page_size
    if kv.k_scales is None:
        keys, values = kv.k[page, :, :, place // 16, :, place % 16], kv.v[page, :, :, place]
        return [t.astype(np.float32) for t in (keys, values)]
    keys, values = kv.k[page, :, :, place // 16, :, place % 16], kv.v[page, :, :, place // 4, ..., place % 4]
    scales = [s[page, :, :, place] for s in (kv.k_scales, kv.v_scales) if s is not None]
    return [t.astype(np.float32) for t in (keys, values, *scales)]


def target_stored(engine: Engine, pages: list[int], end: int) -> list[np.ndarray]:
    """The target's keys and values of the first `end` tokens."""
    return keys_and_values(native(engine).kv, pages, 0, end)


def draft_stored(engine: Engine, pages: list[int], first: int, end: int) -> list[np.ndarray]:
    """The draft's keys and values of KV indices [first, end), and the fused features that its rows there begin with."""
    backend = native(engine)
    index = np.arange(max(first - 1, 0), end - 1)
    size = engine.pool.page_size
    fused = backend.fused[np.array(pages)[index // size], index % size]
    return [*keys_and_values(backend.draft_kv, pages, first, end), fused]


def fill(llm: LLM, value: float) -> None:
    """Let all storage hold one value, NaN for instance: what nobody has written must not be read."""
    backend = native(llm.engine)
    for kv in (backend.kv, backend.draft_kv):
        for storage in (kv.k, kv.v) if kv.k_scales is None else (kv.k_scales, kv.v_scales):
            storage.fill(value)
    backend.fused.fill(value)


def first_draft_key(llm: LLM, slot: int) -> int:
    """The first KV index that holds a draft key, as the last Admit of the slot said."""
    admits = [admit for step in [llm.engine.pipeline.last] if step is not None for admit in step.message.admits]
    return next(admit.first_draft_key for admit in admits if admit.slot == slot)


def settle(engine: Engine) -> None:
    """Write the draft keys that published pages still want: what the next step would begin with."""
    native(engine).draft(StepInput(extends=tuple(engine.scheduler.extends.values())))
    engine.scheduler.extends.clear()

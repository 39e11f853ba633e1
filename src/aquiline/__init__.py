"""aquiline: EAGLE-3 speculative decoding, exact and fast.

The names below load on first use, so that `aquiline --help` does not wait for the engine.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aquiline.config import EngineConfig, SamplingParams
    from aquiline.engine.async_llm import AsyncLLM
    from aquiline.engine.llm import LLM, Output
    from aquiline.spec.adaptive import Adaptive
    from aquiline.spec.drafting import Chain, Drafting, Dynamic, NoDraft, Static
    from aquiline.spec.lookup import Lookup

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Adaptive",
    "AsyncLLM",
    "Chain",
    "Drafting",
    "Dynamic",
    "EngineConfig",
    "Lookup",
    "NoDraft",
    "Output",
    "SamplingParams",
    "Static",
    "__version__",
]

_HOMES = {
    "Adaptive": "aquiline.spec.adaptive",
    "AsyncLLM": "aquiline.engine.async_llm",
    "LLM": "aquiline.engine.llm",
    "Output": "aquiline.engine.llm",
    "EngineConfig": "aquiline.config",
    "SamplingParams": "aquiline.config",
    "Chain": "aquiline.spec.drafting",
    "Drafting": "aquiline.spec.drafting",
    "Dynamic": "aquiline.spec.drafting",
    "Lookup": "aquiline.spec.lookup",
    "NoDraft": "aquiline.spec.drafting",
    "Static": "aquiline.spec.drafting",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'aquiline' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

"""How much memory a loaded pair and its caches take, known before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.config import EngineConfig
from aquiline.engine.model import LoadedModels
from aquiline.errors import OutOfMemory

GB = 1e9


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of weights, keys and values. Memory for keys and values becomes resident as pages are first used."""

    weight_bytes: int
    target_kv_bytes_per_token: int
    draft_kv_bytes_per_token: int
    page_size: int
    num_pages: int
    max_context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes that one token takes in the pages of target and draft together."""
        return self.target_kv_bytes_per_token + self.draft_kv_bytes_per_token

    @property
    def kv_bytes(self) -> int:
        """Bytes of all pages."""
        return self.kv_bytes_per_token * self.page_size * self.num_pages

    def as_dict(self) -> dict[str, int]:
        """The `memory` object of a JSON result."""
        names = ("weight_bytes", "target_kv_bytes_per_token", "draft_kv_bytes_per_token", "kv_bytes_per_token")
        more = ("page_size", "num_pages", "kv_bytes", "max_context")
        return {name: int(getattr(self, name)) for name in (*names, *more)}

    def __str__(self) -> str:
        tokens = self.num_pages * self.page_size
        return (
            f"memory: weights {self.weight_bytes / GB:.2f} GB; KV {self.kv_bytes_per_token} bytes per token "
            f"(target {self.target_kv_bytes_per_token}, draft {self.draft_kv_bytes_per_token}), {self.num_pages} pages "
            f"of {self.page_size} tokens = {tokens} tokens, up to {self.kv_bytes / GB:.2f} GB; one sequence up to "
            f"{self.max_context} tokens"
        )


def plan_memory(models: LoadedModels, page_size: int, num_pages: int, max_context: int) -> MemoryPlan:
    """The memory plan of an engine with num_pages pages."""
    target, draft = models.pair.kv_bytes_per_token()
    return MemoryPlan(models.weight_bytes, target, draft, page_size, num_pages, max_context)


def affordable_pages(models: LoadedModels, config: EngineConfig) -> int:
    """Pages that config.cache_fraction of the free memory holds. Raises OutOfMemory if that is less than one page."""
    page_bytes = sum(models.pair.kv_bytes_per_token()) * config.page_size
    free = models.pair.free_bytes()
    pages = int(free * config.cache_fraction) // page_bytes
    if pages < 1:
        raise OutOfMemory(
            f"cache_fraction={config.cache_fraction}: a page of {config.page_size} tokens takes {page_bytes / GB:.3f} "
            f"GB and {free / GB:.2f} GB are free; raise cache_fraction, lower page_size, or free memory"
        )
    return pages

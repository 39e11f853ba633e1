"""Small random transformers models and left-padded prompts for them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tests.conftest import engine_config
from torch import Tensor

from aquiline.models.families import read_model_config
from aquiline.transformers import Speculation, speculative
from checkpoints import write_draft, write_target

PAD = 0


@lru_cache
def _pair(family: str) -> tuple[Any, TemporaryDirectory[str]]:
    place = TemporaryDirectory()
    model = write_target(Path(place.name) / "target", family)
    model.generation_config.pad_token_id = PAD
    write_draft(Path(place.name) / "draft", read_model_config(Path(place.name) / "target"))
    return model, place


def model_of(family: str = "llama") -> Any:
    """The one model of a family, in float32."""
    return _pair(family)[0]


def draft_of(family: str = "llama") -> Path:
    """A random draft for it."""
    return Path(_pair(family)[1].name) / "draft"


def new_model(seed: int = 7, **fields: Any) -> Any:
    """A llama of its own, which a test may change."""
    with TemporaryDirectory() as place:
        model = write_target(place, seed=seed, **fields)
    model.generation_config.pad_token_id = PAD
    return model


def speculating(draft: Path | None = None, drafter: Any = None, **settings: Any) -> Speculation:
    """`speculative` over an engine whose small pages are crossed, and which checks them after every step."""
    return speculative(draft, drafter, engine=settings.pop("engine", engine_config()), **settings)


def batch(rows: int = 8, length: int = 12, seed: int = 0) -> dict[str, Tensor]:
    """Prompts of `length` tokens, one token fewer in each row, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 90, (rows, length), generator=generator)
    mask = (torch.arange(length)[None] >= torch.arange(rows)[:, None]).long()
    return {"input_ids": ids * mask + PAD * (1 - mask), "attention_mask": mask}

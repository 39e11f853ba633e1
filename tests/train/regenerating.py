"""A tiny chat target that stops now and then, prompts for it, and a run over them, for every test of regeneration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.conftest import engine_config, tiny_models
from tests.engine.test_stops import letters
from transformers import PreTrainedTokenizerFast

from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels
from aquiline.regenerate.regenerate_config import RegenerateConfig
from aquiline.regenerate.regeneration import Regenerated, Regeneration, asked_settings
from aquiline.spec.drafting import Drafting, NoDraft
from aquiline.text.chat_template import ChatTemplate

STOPS = (30, 76, 84)
"""Tokens that end an answer; a random target draws them now and then."""
END = letters().id_to_token(76)
TEMPLATE = (
    "{% for m in messages %}{{ {'system': '#', 'user': '<', 'assistant': '>'}[m.role] + m.content }}"
    + END
    + "{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
TURNS = [
    ["abcdefghijklmnopq"],
    ["xyz", "and?", "so?"],
    ["Hello"],
    ["12345", "6789"],
    ["Who", "Why"],
    ["ABC"],
    ["q", "r"],
]
ROWS: list[dict[str, Any]] = [
    {"source": "s", "license": "MIT", "note": "not copied", "messages": [{"role": "user", "content": t} for t in turns]}
    for turns in TURNS
]  # fmt: skip


def target(directory: Path, template: str | None = TEMPLATE) -> Path:
    """The files of a target that its prompts come from."""
    PreTrainedTokenizerFast(tokenizer_object=letters(), eos_token=END).save_pretrained(directory)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def llm(
    max_batch: int = 3, drafting: Drafting | None = None, models: LoadedModels | None = None, **settings: Any
) -> LLM:
    loaded = dataclasses.replace(models or tiny_models(eos_token_ids=STOPS), tokenizer=letters())
    config = engine_config(max_batch, **{"prefix_cache": True} | settings)
    return LLM.from_models(loaded, config, drafting or NoDraft())


def regenerate(checkpoint: Path, data: Path, out: Path, engine: LLM | None = None, **fields: Any) -> Regenerated:
    runs = engine or llm()
    config = RegenerateConfig((data,), out, **{"max_tokens": 12} | fields)
    template = ChatTemplate.load(checkpoint, runs.models.tokenizer)
    return Regeneration(runs, template, config, asked_settings(config, checkpoint, None)).run()


def read(path: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({row["id"] for row in rows}) == len(rows)
    return {row["id"]: row for row in rows}

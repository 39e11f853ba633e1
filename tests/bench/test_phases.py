"""benchmarks/phases.py: what is copied stands whole in the prompts of its phase."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.conftest import needs_native

from aquiline.config import EngineConfig
from aquiline.engine.llm import LLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from phases import Phase

pytestmark = needs_native


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", engine=EngineConfig(max_batch=1))


def prompt_of(llm: LLM, task: str, is_chat: bool) -> str:
    (ids,) = Phase(task, 1, 512, 0.0).prompts(llm, is_chat)
    assert llm.models.tokenizer is not None
    return llm.models.tokenizer.decode(ids)


def test_a_source_that_was_written_twice_is_begun_again(llm: LLM) -> None:
    first, second, begun = prompt_of(llm, "quote", is_chat=False).split("written once more:\n\n")
    text = first.partition("\n\n# The same")[0]
    assert len(text) > 400 and second.startswith(text)
    assert len(begun) == 40 and text.lstrip().startswith(begun)


def test_a_chat_asks_for_another_text_than_the_one_that_was_answered(llm: LLM) -> None:
    prompt = prompt_of(llm, "json", is_chat=True)
    answered, asked = (json.loads(line) for line in prompt.splitlines() if line.endswith("}]"))
    assert len(answered) == len(asked) == 8 and answered != asked
    assert json.dumps(answered, indent=2) in prompt and json.dumps(asked, indent=2) not in prompt

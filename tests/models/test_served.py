"""What the engine serves equals transformers: the native forward over pages, prompts in chunks, one step per token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import write_target
from tests.conftest import needs_native
from tests.models.test_targets import CASES, greedy, random_tokens

from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM

pytestmark = needs_native


@pytest.mark.parametrize("name", CASES)
def test_served_logits_and_text_equal_transformers(name: str, tmp_path: Path) -> None:
    family, overrides = CASES[name]
    reference = write_target(tmp_path, family, **overrides)
    llm = LLM(
        tmp_path, dtype="float32", engine=EngineConfig(max_batch=1, page_size=16, row_budget=64, prefix_cache=False)
    )
    prompt = random_tokens(150)  # chunks of 64, 64 and 22; windows of 24 are passed
    theirs = greedy(reference, prompt, 64)[0].tolist()
    params = SamplingParams(max_tokens=64, ignore_eos=True)
    assert llm.generate([prompt[0].tolist()], params)[0].token_ids == theirs[150:]

    llm.generate([theirs[:150]], SamplingParams(max_tokens=1))
    rows = llm.engine.stepper.rows.num
    ours = llm.models.target.logits(np.arange(rows, dtype=np.int32))
    expected = reference(prompt).logits[0, -rows:].numpy()
    assert rows == 22 and np.abs(ours - expected).max() < 1e-4, float(np.abs(ours - expected).max())

"""What the engine serves equals transformers: the native forward over pages, prompts in chunks, one step per token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints import write_target
from tests.conftest import needs_native
from tests.models.test_targets import CASES, greedy, random_tokens

from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM

pytestmark = needs_native


@pytest.mark.parametrize("name", CASES)
def test_served_text_and_probabilities_equal_transformers(name: str, tmp_path: Path) -> None:
    """Of every token of the vocabulary behind every token of prompt and output."""
    family, overrides = CASES[name]
    reference = write_target(tmp_path, family, **overrides)
    llm = LLM(
        tmp_path, dtype="float32", engine=EngineConfig(max_batch=1, page_size=16, row_budget=64, prefix_cache=False)
    )
    prompt = random_tokens(150)  # chunks of 64, 64 and 22; windows of 24 are passed
    theirs = greedy(reference, prompt, 64)
    size = llm.models.vocab_size
    params = SamplingParams(max_tokens=64, ignore_eos=True, logprobs=size, prompt_logprobs=size)
    output = llm.generate([prompt[0].tolist()], params)[0]
    assert output.token_ids == theirs[0, 150:].tolist()

    laws = reference(theirs).logits[0, :-1].double().log_softmax(-1)
    assert output.prompt_logprobs is not None and output.logprobs is not None
    ours = [[entry.top[token] for token in range(size)] for entry in output.prompt_logprobs + output.logprobs]
    difference = (laws.new_tensor(ours) - laws).abs().max()
    assert len(ours) == 213 and difference < 1e-4, float(difference)

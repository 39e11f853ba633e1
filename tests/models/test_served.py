"""What the engine serves equals transformers: the native forward over pages, prompts in chunks, one step per token."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.checkpoints import write_draft, write_target
from tests.conftest import needs_native
from tests.models.test_targets import CASES, greedy, random_tokens

from aquiline.config import EngineConfig, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.models.load import read_model_config
from aquiline.spec.adaptive import Adaptive
from aquiline.spec.drafting import Chain, NoDraft

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


@pytest.mark.parametrize(
    ("shape", "named"),
    [
        ({"hidden_size": 200, "intermediate_size": 1000, "head_dim": 50}, "hidden_size=200"),
        ({"intermediate_size": 1000}, "intermediate_size=1000"),
        ({"head_dim": 8}, "head_dim=8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_shape_that_the_native_path_refuses_runs_as_its_error_says(
    shape: dict[str, int], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch, and the text is transformers', with speculation and without."""
    reference = write_target(tmp_path / "target", "llama", num_hidden_layers=3, **shape)
    write_draft(tmp_path / "draft", read_model_config(tmp_path / "target"))
    engine = EngineConfig(max_batch=2, page_size=16, calibration=False)

    def opened() -> LLM:
        return LLM(tmp_path / "target", tmp_path / "draft", dtype="float32", engine=engine, capture=(0, 1, 2))

    with pytest.raises(ValueError, match=f"{named}: the native path needs a multiple of 16; .*AQUILINE_ISA=off"):
        opened()
    monkeypatch.setenv("AQUILINE_ISA", "off")
    llm, prompt = opened(), random_tokens(9)
    theirs = greedy(reference, prompt, 16)[0, 9:].tolist()
    for drafting in (NoDraft(), Chain(3), Adaptive()):
        output = llm.generate([prompt[0].tolist()], SamplingParams(max_tokens=16, ignore_eos=True), drafting=drafting)[
            0
        ]
        assert output.token_ids == theirs, drafting.name
    assert llm.models.pair.name == "torch"

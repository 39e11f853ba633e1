"""Targets with experts: the logits and the text of transformers, and the same text with and without speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import write_draft, write_mxfp4, write_target
from tests.conftest import engine_config, needs_native
from tests.engine.logits import logits_of
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.gguf_files import write_gguf_target

from aquiline.config import Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading, load_models
from aquiline.models.load import read_model_config
from aquiline.spec.lookup import Lookup

pytestmark = needs_native

FULL = {
    "sliding_window": 128, "max_position_embeddings": 131_072,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
"""gpt-oss's own windows and rotation."""


def write(place: Path, layout: str, **overrides: Any) -> Any:
    """Write a checkpoint, and return its float32 model in transformers."""
    from transformers import AutoModelForCausalLM, Mxfp4Config

    if layout == "mxfp4":
        write_mxfp4(place, **overrides)
    else:
        write_target(place, layout, dtype=torch.bfloat16, **overrides)
    how = {"quantization_config": Mxfp4Config(dequantize=True)} if layout == "mxfp4" else {}
    return AutoModelForCausalLM.from_pretrained(
        place, trust_remote_code=False, dtype=torch.float32, attn_implementation="eager", **how
    ).eval()


def loaded(place: Path, dtype: str = "float32") -> LoadedModels:
    return load_models(place, None, Loading(dtype, "float32", "float32"), Environment.read())


def compare(model: Any, found: np.ndarray, text: list[int], label: str) -> None:
    """Logits within 1e-4 on every row whose experts are no near tie: where they are, two sums choose differently."""
    with torch.no_grad():
        out = model(torch.tensor([text]), output_router_logits=True)
    per_token = model.config.num_experts_per_tok
    gaps = []
    for logits in out.router_logits:
        best = logits.reshape(-1, logits.shape[-1]).sort(-1, descending=True).values
        gaps.append(best[:, per_token - 1] - best[:, per_token])
    clear = torch.stack(gaps).amin(0) >= 1e-4
    worst = (torch.from_numpy(found) - out.logits[0])[clear].abs().max()
    print(f"{label}: {int((~clear).sum())} of {len(text)} rows left out for near ties, worst {float(worst):.1e}")
    assert clear.sum() > 0.9 * len(text)
    assert worst < 1e-4, label


@pytest.mark.parametrize("layout", ["gpt_oss", "mxfp4", "qwen3_moe"])
@pytest.mark.parametrize("is_gguf", [False, True], ids=["hugging face", "gguf"])
def test_logits_and_greedy_text_equal_transformers(layout: str, is_gguf: bool, tmp_path: Path) -> None:
    model = write(tmp_path / "hf", layout, **({} if layout == "qwen3_moe" else {"sliding_window": 128}))
    place = tmp_path / "hf"
    if is_gguf:
        place = tmp_path / "target.gguf"
        write_gguf_target(place, tmp_path / "hf")
    models = loaded(place)
    rng = np.random.default_rng(0)
    for length in (1, 9, 200):
        text = rng.integers(1, 96, length).tolist()
        compare(model, logits_of(models, text), text, f"{layout}, {length} tokens")
    llm = LLM.from_models(models, engine_config(1))
    prompt = rng.integers(1, 96, 100).tolist()
    ours = llm.generate([prompt], SamplingParams(max_tokens=64, ignore_eos=True), drafting=BASELINE)[0].token_ids
    with torch.no_grad():  # by induction: given our tokens so far, theirs is ours at every step
        theirs = model(torch.tensor([prompt + ours])).logits[0, len(prompt) - 1 : -1].argmax(-1).tolist()
    assert ours == theirs


@pytest.mark.rare
@pytest.mark.parametrize("layout", ["gpt_oss", "mxfp4"])
def test_logits_past_the_rotations_first_context_equal_transformers(layout: str, tmp_path: Path) -> None:
    """Positions past 4,096, where YaRN begins to matter, and windows of 128 on the even layers. No two experts of this
    text are nearer than 1e-5: some CPU's sums would choose the other one, and later rows see what it wrote."""
    model = write(tmp_path, layout, **FULL)
    text = np.random.default_rng(2).integers(1, 96, 4200).tolist()
    compare(model, logits_of(loaded(tmp_path), text), text, layout)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    write_mxfp4(folder / "hf", num_hidden_layers=8)
    write_draft(folder / "draft", read_model_config(folder / "hf"), dtype=torch.bfloat16)
    return folder / "hf", folder / "draft"


@pytest.mark.parametrize("sampling", ["greedy", "sampled", pytest.param("filtered", marks=pytest.mark.rare)])
def test_every_drafter_gives_the_baseline(sampling: str, pair: tuple[Path, Path]) -> None:
    llm = LLM(*pair, engine=engine_config(3))
    assert (llm.models.storage, llm.models.arithmetic) == ("mxfp4+bfloat16", "int8")
    texts = [[t % 96 for t in prompt] for prompt in prompts(8)]
    expected = llm.run(texts, SAMPLINGS[sampling], drafting=BASELINE)
    assert expected.summary.slots.num_experts >= 4 * 8 * expected.summary.slots.num_steps
    for name, drafting in {**SPECS, "lookup": Lookup()}.items():
        result = llm.run(texts, SAMPLINGS[sampling], drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline"
        check_accounting(result)
    for max_batch, row_budget in ((1, 7), (8, 1), (8, 64)):
        other = LLM(*pair, engine=engine_config(max_batch, row_budget))
        assert tokens(other.run(texts, SAMPLINGS[sampling], drafting=SPECS["dynamic"])) == tokens(expected)


def test_preempted_and_cached_prompts_give_the_baseline(pair: tuple[Path, Path]) -> None:
    """Few pages, so that sequences are preempted; and the same prompts twice, whose pages are cached."""
    texts = [[t % 96 for t in prompt] for prompt in prompts(8)]
    expected = tokens(LLM(*pair, engine=engine_config(8)).run(texts, SAMPLINGS["sampled"], drafting=BASELINE))
    tight = LLM(*pair, engine=engine_config(8, num_pages=16))
    result = tight.run(texts, SAMPLINGS["sampled"], drafting=SPECS["chain4"])
    assert tokens(result) == expected and result.summary.num_preemptions > 0
    cached = LLM(*pair, engine=engine_config(8, prefix_cache=True))
    for _ in range(2):
        result = cached.run(texts, SAMPLINGS["sampled"], drafting=SPECS["chain4"])
        assert tokens(result) == expected
    assert result.summary.counters.prefix_hit_rate > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "int4"])
def test_experts_stay_packed_whatever_the_rest_is_stored_in(dtype: str, pair: tuple[Path, Path]) -> None:
    llm = LLM(*pair, dtype=dtype, engine=engine_config(2))
    texts = [[t % 96 for t in prompt] for prompt in prompts(3)]
    plain = tokens(llm.run(texts, SAMPLINGS["greedy"], drafting=BASELINE))
    assert tokens(llm.run(texts, SAMPLINGS["greedy"], drafting=SPECS["chain4"])) == plain
    assert llm.models.storage == f"mxfp4+{dtype}"

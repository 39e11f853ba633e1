"""Exactness where requests or models are unlike: other flags of the decoder, other parameters side by side."""

from __future__ import annotations

import dataclasses

import pytest
from tests.conftest import GEMMA, TINY, TINY_DRAFT, engine_config, from_modules, needs_native, tiny_llm, tiny_pair
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, prompts, tokens

from aquiline.config import Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading
from aquiline.models.model_config import Experts

pytestmark = needs_native

FLAGS = {
    "mistral": {"windows": (24,) * 4},
    "qwen2": {"qkv_bias": True, "windows": (0, 0, 9, 9)},
    "qwen3": {"qk_norm": True, "tied_head": True},
    "llama": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "sinks": True},
    "gpt_oss": {
        "qkv_bias": True, "o_bias": True, "sinks": True, "windows": (24, 0) * 2, "activation": "clamped",
        "activation_limit": 7.0, "experts": Experts(count=8, per_token=4, has_bias=True),
    },
    "qwen3_moe": {"qk_norm": True, "experts": Experts(count=6, per_token=2)},
    "gemma3_text": GEMMA,
}  # fmt: skip


@pytest.mark.parametrize("family", FLAGS)
def test_every_family_gives_the_baseline(family: str) -> None:
    target = dataclasses.replace(TINY, family=family, **FLAGS[family])  # type: ignore[arg-type]
    layer = dataclasses.replace(TINY_DRAFT.model, windows=(20,))
    draft = dataclasses.replace(TINY_DRAFT, model=layer, fc_norm=True, norm_feedback=True)
    config = engine_config(4)
    llm = LLM.from_models(
        from_modules(*tiny_pair(3, target, draft), None, Loading("float32"), Environment.read()), config
    )
    plain = tiny_llm("float32", max_batch=4)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["sampled"]):
        expected = tokens(llm.run(prompts(6), sampling, drafting=BASELINE))
        assert expected != tokens(plain.run(prompts(6), sampling, drafting=BASELINE)), "the flags should matter"
        for name in ("chain4", "static", "dynamic"):
            assert tokens(llm.run(prompts(6), sampling, drafting=SPECS[name])) == expected, f"{family}, {name}"


@pytest.mark.parametrize("name", ["chain4", "dynamic"])
def test_requests_with_other_parameters_beside_them(name: str) -> None:
    llm = tiny_llm(max_batch=3)
    batch = list(zip(prompts(5), SAMPLINGS.values(), strict=True))
    alone = [tokens(llm.run([prompt], sampling, drafting=BASELINE))[0] for prompt, sampling in batch]
    together = [
        llm.engine.add(llm.request(i, prompt, sampling, SPECS[name])) for i, (prompt, sampling) in enumerate(batch)
    ]
    while llm.engine.is_busy:
        llm.engine.step()
    assert [s.output_ids for s in together] == alone

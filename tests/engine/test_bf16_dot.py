"""The exactness contract holds in arithmetics of floats: speculation changes no token, batches and chunks no bit."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from tests.conftest import engine_config, from_modules, needs_native, round_to, tiny_pair
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens

from aquiline.backends.cpu import native, native_weights
from aquiline.backends.cpu.native_pair import resolve_arithmetic
from aquiline.config import Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading

pytestmark = needs_native

ARITHMETICS = ("float32", "bfloat16", "bfloat16_tiles")


@lru_cache
def llm_in(arithmetic: str, max_batch: int = 3, row_budget: int = 48) -> LLM:
    if arithmetic == "bfloat16" and not native_weights.has_bf16_dot():
        pytest.skip("this CPU has no AVX512_BF16")
    decoder, head = tiny_pair()
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
    config = engine_config(max_batch, row_budget)
    models = from_modules(decoder, head, None, Loading("bfloat16", arithmetic), Environment.read())
    return LLM.from_models(models, config)


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered", "penalised"])
def test_speculation_changes_no_token(arithmetic: str, sampling: str) -> None:
    llm, batch = llm_in(arithmetic), prompts(8)
    expected = llm.run(batch, SAMPLINGS[sampling], drafting=BASELINE)
    for name in ("chain1", "chain4", "chain8", "static", "dynamic", "dynamic-60-5-10"):
        result = llm.run(batch, SAMPLINGS[sampling], drafting=SPECS[name])
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline in {arithmetic} arithmetic"
        check_accounting(result)
    assert llm.models.system()["arithmetic"] == arithmetic


@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_batches_and_chunks_change_no_token(arithmetic: str) -> None:
    sampling = SAMPLINGS["sampled"]
    expected = tokens(llm_in(arithmetic).run(prompts(8), sampling, drafting=BASELINE))
    for max_batch, row_budget in ((1, 7), (8, 1), (8, 64)):
        got = tokens(llm_in(arithmetic, max_batch, row_budget).run(prompts(8), sampling, drafting=SPECS["dynamic"]))
        assert got == expected, (arithmetic, max_batch, row_budget)


def test_they_differ() -> None:
    outputs = [tokens(llm_in(a).run(prompts(8), SAMPLINGS["sampled"], drafting=BASELINE)) for a in ARITHMETICS]
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


def test_auto_is_the_fastest_of_those_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = (native.BFLOAT16, native.BFLOAT16_DOT, native.BFLOAT16_TILES)
    for arithmetic, code in zip(ARITHMETICS, codes, strict=True):
        monkeypatch.setattr(native_weights.library(), "fastest_bf16", lambda code=code: code)
        assert resolve_arithmetic("auto", "bfloat16") == arithmetic
        assert resolve_arithmetic("auto", "float32") == resolve_arithmetic("auto", "float16") == "float32"
        for dtype in ("int8", "int4", "packed"):
            assert resolve_arithmetic("auto", dtype) == "int8"


def on_torch(arithmetic: str) -> LoadedModels:
    return from_modules(*tiny_pair(), None, Loading("bfloat16", arithmetic), Environment("off", 1))


def test_what_cannot_be_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for arithmetic, dtype, named in (
        ("int4", "bfloat16", "arithmetic='int4': must be one of auto, float32, bfloat16, bfloat16_tiles, int8"),
        ("int8", "bfloat16", "arithmetic='int8': needs a dtype of packed, int8, int4, and dtype is 'bfloat16'"),
        ("bfloat16", "float32", "needs dtype='bfloat16'"),
        ("bfloat16_tiles", "packed", "needs dtype='bfloat16'"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=named):
            resolve_arithmetic(arithmetic, dtype)
    monkeypatch.setattr(native_weights, "has_bf16_dot", lambda: False)
    with pytest.raises(ValueError, match="AVX512_BF16; use arithmetic='float32'"):
        resolve_arithmetic("bfloat16", "bfloat16")


def test_the_torch_path_has_float32_alone() -> None:
    assert on_torch("auto").arithmetic == on_torch("float32").arithmetic == "float32"
    with pytest.raises(ValueError, match=r"torch path.*use arithmetic='float32'"):
        on_torch("bfloat16")
    with pytest.raises(ValueError, match=r"arithmetic='int8': the torch path has float32 only"):
        on_torch("int8")
    with pytest.raises(
        ValueError, match="arithmetic='int4': must be one of auto, float32, bfloat16, bfloat16_tiles, int8"
    ):
        on_torch("int4")

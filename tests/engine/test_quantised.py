"""int8 and int4 storage: speculation changes no token, batches and chunks no bit; torch has the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.checkpoints import write_draft, write_target
from tests.conftest import TINY_DRAFT, engine_config, from_modules, needs_native, round_to, tiny_llm, tiny_pair
from tests.engine.logits import head_of, logits_of
from tests.engine.storage import native as backend_of
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_golden import choose_isa, observe, restored_isa

from aquiline.backends.base import Admit, Chunk, Decode, Pages, Sizes, StepInput
from aquiline.backends.cpu.native_pair import resolve_arithmetic
from aquiline.blocks import FLOATS, Parts, in_memory
from aquiline.config import ISAS, Environment, SamplingParams
from aquiline.engine.llm import LLM
from aquiline.engine.model import LoadedModels, Loading
from aquiline.engine.score import Scorer
from aquiline.models.known_pairs import BUNDLED_PROMPTS, BUNDLED_TARGET
from aquiline.models.load import read_model_config
from aquiline.ops.quantise import stored_sizes
from aquiline.spec.drafting import Static

__all__ = ["restored_isa"]

GOLDEN = Path(__file__).with_name("golden_quantised.json")
DTYPES = ["int8", "int4"]
both = pytest.mark.parametrize("dtype", DTYPES)


@needs_native
@both
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered"])
def test_every_drafter_gives_the_baseline(dtype: str, sampling: str) -> None:
    llm = tiny_llm(dtype, max_batch=3)
    expected = llm.run(prompts(8), SAMPLINGS[sampling], drafting=BASELINE)
    for name, drafting in SPECS.items():
        result = llm.run(prompts(8), SAMPLINGS[sampling], drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline in {dtype}"
        check_accounting(result)
    assert llm.models.system()["dtype"] == dtype and llm.models.pair.kv_dtype == "bfloat16"


@needs_native
@both
def test_batch_and_chunks_change_nothing(dtype: str) -> None:
    expected = tokens(tiny_llm(dtype, max_batch=3).run(prompts(8), SAMPLINGS["sampled"], drafting=BASELINE))
    for max_batch, row_budget in ((1, 7), (8, 1), (8, 64)):
        llm = tiny_llm(dtype, max_batch=max_batch, row_budget=row_budget)
        for name in ("chain4", "dynamic"):
            got = tokens(llm.run(prompts(8), SAMPLINGS["sampled"], drafting=SPECS[name]))
            assert got == expected, f"{name}, {dtype}, batch {max_batch}, chunks of {row_budget}"


@needs_native
def test_every_storage_has_its_own_text() -> None:
    texts = [
        tokens(tiny_llm(d).run(prompts(8), SAMPLINGS["sampled"], drafting=BASELINE)) for d in ("bfloat16", *DTYPES)
    ]
    assert texts[0] != texts[1] != texts[2] != texts[0]


@needs_native
@both
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("arithmetic", ["float32", "int8"])
def test_every_path_reproduces_the_golden_run(
    arithmetic: str, dtype: str, isa: str, restored_isa: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_isa(isa, 2, monkeypatch)
    expected = json.loads(GOLDEN.read_text())[f"{dtype}, {arithmetic} arithmetic"]
    assert observe(dtype, arithmetic) == expected, f"{dtype} on {isa} differs from the golden run"


def pair_llm(dtype: str, isa: str | None) -> LLM:
    decoder, head = tiny_pair()
    for module in (decoder, head):
        round_to(module, torch.bfloat16)
    head.embed = decoder.embed
    decoder.head = decoder.embed  # tied: the head is quantised, the embedding is not
    config = engine_config(3)
    return LLM.from_models(from_modules(decoder, head, None, Loading(dtype, "float32"), Environment(isa, 1)), config)


def preferred(models: LoadedModels, prompt: list[int]) -> list[int]:
    """All tokens that the draft has, as it prefers them behind a prompt, and as it prefers them behind its first."""
    assert models.draft_config is not None
    width = models.draft_config.draft_vocab_size
    backend, root = models.pair.open(Sizes(1, 16, 16, 16, 128)), len(prompt) - 1
    admit = Admit(0, prompt, root, SamplingParams(seed=0), drafts=True)
    chunk = Chunk(0, 0, root, is_last=True, draws=False)
    backend.step(StepInput(admits=(admit,), pages=(Pages(0, 0, tuple(range(16))),), chunks=(chunk,))).read()
    paths = tuple((*above, rank) for above in ((), (0,)) for rank in range(width))
    drafts = backend.draft(StepInput(decodes=(Decode(0, Static(paths)),)))
    return drafts.read().tokens[1:].tolist()


@needs_native
@both
def test_the_torch_path_has_the_same_weights(dtype: str) -> None:
    """Hidden states, features and logits of every row within 1e-4 of the native ones, drafts in the same order of
    preference, and the path is named."""
    found, prompt = [], prompts(6)[5][:40]
    for isa in (None, "off"):
        models = pair_llm(dtype, isa).models
        scored = Scorer(models, 64)([np.array(prompt, np.int32)])
        hidden = scored.hidden.copy()
        found.append((hidden, scored.features.copy(), head_of(models.pair, hidden), preferred(models, prompt), models))
    for ours, theirs in zip(found[0][:3], found[1][:3], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())
    assert found[0][3] == found[1][3] and len(set(found[0][3])) == TINY_DRAFT.draft_vocab_size
    assert [m.system()["path"] for *_, m in found] == ["native", "torch"]
    assert [m.system()["dtype"] for *_, m in found] == [dtype, dtype]
    assert found[0][4].weight_bytes == found[1][4].weight_bytes


@needs_native
@both
def test_the_torch_path_writes_the_same_text(dtype: str) -> None:
    texts = [tokens(pair_llm(dtype, isa).run(prompts(5), SAMPLINGS["sampled"])) for isa in (None, "off")]
    assert texts[0] == texts[1], "no near tie in this fixture"


def test_weights_are_counted_as_stored() -> None:
    def stored(*shape: int) -> Parts:
        return (in_memory(np.zeros(shape, FLOATS["bfloat16"])),)

    embed, norm = stored(96, 64), np.zeros(64, FLOATS["bfloat16"])
    layer = [("embed", embed), ("head", embed), ("norm", norm), ("down", stored(64, 128))]
    plain = 2 * 96 * 64 + 2 * 64
    for named, dtype, others in (
        ([*layer, *layer], "bfloat16", 2 * 64 * 128), (layer, "int8", 96 * (64 + 4) + 64 * (128 + 4)),
        (layer, "int4", (96 * 64 + 64 * 128) * 9 // 16),
    ):  # fmt: skip
        assert sum(stored_sizes(named, dtype).values()) == plain + others


@needs_native
@both
def test_a_checkpoint_is_quantised_as_it_loads(dtype: str, tmp_path: Path) -> None:
    write_target(tmp_path / "target", dtype=torch.bfloat16, hidden_size=64, intermediate_size=128)
    write_draft(tmp_path / "draft", read_model_config(tmp_path / "target"), dtype=torch.bfloat16)
    outputs = {}
    for storage in ("bfloat16", dtype):
        llm = LLM(tmp_path / "target", tmp_path / "draft", dtype=storage, engine=engine_config(2))
        outputs[storage] = tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"]))
        assert outputs[storage] == tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=BASELINE))
        assert backend_of(llm.engine).kv.k.dtype == FLOATS["bfloat16"]
        outputs[storage, "bytes"] = llm.engine.memory.weight_bytes
    assert outputs[dtype] != outputs["bfloat16"]
    assert outputs[dtype, "bytes"] < 0.8 * outputs["bfloat16", "bytes"]


@needs_native
def test_the_bundled_target_stays_close_to_itself() -> None:
    """Logits on held-out source beside those of bfloat16. Measured over all prompts (docs/log): 0.022 and 0.26."""
    text = json.loads(BUNDLED_PROMPTS.read_text().splitlines()[0])["text"]
    logits = {}
    for dtype in ("bfloat16", *DTYPES):
        llm = LLM(BUNDLED_TARGET, dtype=dtype, drafting=BASELINE)
        logits[dtype] = logits_of(llm.models, llm.encode(text)[:200])
    for dtype, difference, agreement in (("int8", 0.04, 0.96), ("int4", 0.5, 0.8)):
        assert 0 < np.abs(logits[dtype] - logits["bfloat16"]).mean() < difference
        assert (logits[dtype].argmax(-1) == logits["bfloat16"].argmax(-1)).mean() > agreement


def test_what_cannot_be_is_a_value_error(tmp_path: Path) -> None:
    for dtype in DTYPES:
        with pytest.raises(ValueError, match=f"arithmetic='bfloat16': needs dtype='bfloat16', and dtype is '{dtype}'"):
            resolve_arithmetic("bfloat16", dtype)
    write_target(tmp_path)
    with pytest.raises(ValueError, match=r"dtype='int3': must be one of float32, bfloat16, float16, int8, int4"):
        LLM(tmp_path, dtype="int3")
    with pytest.raises(ValueError, match=r"head is \[160, 48\]: dtype='int4' needs a width .* of 32; use 'int8'"):
        LLM(tmp_path, dtype="int4", engine=engine_config(1))

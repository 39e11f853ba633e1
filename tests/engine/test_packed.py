"""Targets in GGUF's packed blocks: the values of the file, the same text with and without speculation, everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints import write_draft, write_target
from tests.conftest import engine_config, needs_native
from tests.engine.logits import logits_of
from tests.engine.test_exact import BASELINE, SAMPLINGS, SPECS, check_accounting, prompts, tokens
from tests.engine.test_golden import choose_isa, restored_isa
from tests.gguf_files import write_gguf_target

from aquiline.backends.cpu import native
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.decoder import load_target
from aquiline.blocks import BLOCK_TYPES, block_size
from aquiline.config import ISAS, Environment
from aquiline.engine.llm import LLM
from aquiline.engine.model import Loading, load_models
from aquiline.errors import CheckpointError
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.load import read_model_config

__all__ = ["restored_isa"]

GOLDEN = Path(__file__).with_name("golden_packed.json")
pytestmark = needs_native

MIXED = {"v_proj": "Q6_K", "down_proj": "Q6_K", "embed_tokens": "Q6_K", "lm_head": "Q6_K"}
"""How llama.cpp's Q4_K_M stores a layer; all others are Q4_K."""


def kind_of(kind: str) -> Callable[[str], str]:
    """The type of each tensor of a file: norms float32, everything else `kind`, or as a Q4_K_M file has it."""

    def choose(name: str) -> str:
        if "norm" in name:
            return "F32"
        if kind != "Q4_K_M":
            return kind
        return next((own for part, own in MIXED.items() if part in name), "Q4_K")

    return choose


def write_pair(folder: Path, kind: str, **config: object) -> tuple[Path, Path]:
    """A target in a file of blocks and a draft beside it."""
    width = block_size("Q4_K" if kind == "Q4_K_M" else kind)[0] if kind in (*BLOCK_TYPES, "Q4_K_M") else 32
    sizes = {"hidden_size": max(64, width), "intermediate_size": max(96, width)}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": max(16, width // 4)} | config
    write_target(folder / "hf", dtype=torch.float32, **sizes)
    checkpoint, rng = folder / "hf" / "model.safetensors", np.random.default_rng(0)
    weights = load_file(checkpoint)
    for name, weight in weights.items():  # the same on every machine
        whole = torch.from_numpy(rng.integers(-24, 25, tuple(weight.shape)).astype(np.float32))
        weight.copy_((64 + whole) / 64 if "norm" in name else whole / 96)
    save_file(weights, checkpoint, {"format": "pt"})
    file = folder / "target.gguf"
    write_gguf_target(file, folder / "hf", kind=kind_of(kind))
    write_draft(folder / "draft", read_model_config(folder / "hf"), dtype=torch.bfloat16)
    return file, folder / "draft"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A pair whose weights follow from a seed, written once for each kind."""
    return cache(lambda kind: write_pair(tmp_path_factory.mktemp(kind), kind))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, "Q4_K_M"])
def test_float32_arithmetic_gives_the_logits_of_the_unpacked_file(kind: str, tied: bool, tmp_path: Path) -> None:
    """To the bit: embedding rows, fused weights of two types and the heads' order included."""
    file, _ = write_pair(tmp_path, kind, tie_word_embeddings=tied)
    found = []
    for dtype in ("packed", "float32"):
        models = load_models(file, None, Loading(dtype, "float32", "float32"), Environment.read())
        found.append(logits_of(models, list(range(3, 60))))
    assert np.array_equal(found[0].view(np.uint32), found[1].view(np.uint32))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", pytest.param("Q4_K_M", marks=pytest.mark.rare)])
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filtered"])
def test_every_drafter_gives_the_baseline(
    kind: str, sampling: str, written: Callable[[str], tuple[Path, Path]]
) -> None:
    file, draft = written(kind)
    llm = LLM(file, draft, engine=engine_config(3))
    storage = {"Q4_K_M": "q4_k+q6_k"}.get(kind, kind.lower())
    assert (llm.models.storage, llm.models.draft_storage, llm.models.arithmetic) == (storage, "int4", "int8")
    expected = llm.run(prompts(8), SAMPLINGS[sampling], drafting=BASELINE)
    for name, drafting in SPECS.items():
        result = llm.run(prompts(8), SAMPLINGS[sampling], drafting=drafting)
        assert tokens(result) == tokens(expected), f"{name} differs from the baseline in {kind}"
        check_accounting(result)
    for max_batch, row_budget in ((1, 7), (8, 1), (8, 64)):
        other = LLM(file, draft, engine=engine_config(max_batch, row_budget))
        assert tokens(other.run(prompts(8), SAMPLINGS[sampling], drafting=SPECS["dynamic"])) == tokens(expected)


def observe(pair: tuple[Path, Path], arithmetic: str) -> list[list[int]]:
    """Text of a target and its draft."""
    file, draft = pair
    llm = LLM(file, draft, arithmetic=arithmetic, engine=engine_config(4))
    return tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"]))


def is_rare(kind: str, isa: str) -> bool:
    """Whether a golden run takes long: without vector instructions, all kinds but one."""
    return isa == "portable" and kind != "Q4_1"


@pytest.mark.parametrize(
    ("kind", "isa"),
    [
        pytest.param(kind, isa, marks=[pytest.mark.rare] if is_rare(kind, isa) else [])
        for kind in [*BLOCK_TYPES, "Q4_K_M"]
        for isa in ISAS
    ],
)
def test_every_path_reproduces_the_golden_run(
    kind: str,
    isa: str,
    restored_isa: None,
    monkeypatch: pytest.MonkeyPatch,
    written: Callable[[str], tuple[Path, Path]],
) -> None:
    choose_isa(isa, 2, monkeypatch)
    for arithmetic, expected in json.loads(GOLDEN.read_text())[kind].items():
        assert observe(written(kind), arithmetic) == expected, f"{kind} in {arithmetic} on {isa}"


@pytest.mark.parametrize("draft_dtype", ["int8", "int4", "float32"])
def test_the_draft_is_stored_by_itself(draft_dtype: str, tmp_path: Path) -> None:
    file, draft = write_pair(tmp_path, "Q8_0")
    expected = tokens(LLM(file, engine=engine_config(2)).run(prompts(4), SAMPLINGS["sampled"], drafting=BASELINE))
    llm = LLM(file, draft, draft_dtype=draft_dtype, engine=engine_config(2))
    assert tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"])) == expected
    system = llm.models.system()
    assert (system["dtype"], system["draft_dtype"], system["arithmetic"]) == ("q8_0", draft_dtype, "int8")
    assert system["draft_arithmetic"] == ("float32" if draft_dtype == "float32" else "int8")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("arithmetic", ["int8", "float32"])
@pytest.mark.parametrize("draft_dtype", ["int4", "bfloat16", "float32"])
def test_an_embedding_in_blocks_is_in_memory_once(
    draft_dtype: str, arithmetic: str, tied: bool, tmp_path: Path
) -> None:
    """The target's, the draft's and, where it is tied, the target's head, whatever either multiplies in."""
    file, draft = write_pair(tmp_path, "Q4_1", tie_word_embeddings=tied)
    llm = LLM(file, draft, draft_dtype=draft_dtype, arithmetic=arithmetic, engine=engine_config(2))
    pair = llm.models.pair
    assert isinstance(pair, CpuPair) and pair.draft_model is not None
    own, drafts = pair.target_model.struct, pair.draft_model.model.struct
    assert own.embed == drafts.embed and (own.head.weight == own.embed) == tied
    assert native.FORMATS[own.head.dtype] == ("q4_1_dot" if arithmetic == "int8" else "q4_1")
    expected = llm.run(prompts(4), SAMPLINGS["sampled"], drafting=BASELINE)
    assert tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"])) == tokens(expected)


def test_weights_are_counted_as_the_file_has_them(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "Q8_0", tie_word_embeddings=True)
    packed = LLM(file, engine=engine_config(1)).models.weight_bytes
    plain = LLM(file, dtype="float32", engine=engine_config(1)).models.weight_bytes
    norms = 4 * 64 * (2 * read_model_config(file).num_layers + 1)
    assert packed - norms == (plain - norms) * 34 // (32 * 4)


def test_a_draft_without_a_head_takes_rows_of_the_blocks(tmp_path: Path) -> None:
    file, draft = write_pair(tmp_path, "Q4_1")
    weights = load_file(draft / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, draft / "model.safetensors")
    llm = LLM(file, draft, engine=engine_config(2))
    expected = llm.run(prompts(4), SAMPLINGS["sampled"], drafting=BASELINE)
    assert tokens(llm.run(prompts(4), SAMPLINGS["sampled"], drafting=SPECS["chain4"])) == tokens(expected)


def test_what_cannot_be_packed_is_named(tmp_path: Path) -> None:
    file, draft = write_pair(tmp_path, "Q4_0")
    with pytest.raises(CheckpointError, match=r"dtype='packed' is for \.gguf files and experts in MXFP4; use"):
        LLM(tmp_path / "hf", dtype="packed")
    with pytest.raises(ValueError, match="draft_dtype='packed': a draft has no blocks"):
        LLM(file, draft, draft_dtype="packed")
    with pytest.raises(ValueError, match="arithmetic='bfloat16': needs dtype='bfloat16', and dtype is 'packed'"):
        LLM(file, dtype="packed", arithmetic="bfloat16")


def test_torch_runs_the_unpacked_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = write_pair(tmp_path, "Q4_0")
    off = Environment("off", 1)
    assert load_models(file, None, Loading(), off).storage == "bfloat16"
    with pytest.raises(ValueError, match="dtype='packed': only the native library multiplies blocks; use dtype="):
        load_models(file, None, Loading("packed"), off)


def test_scales_that_are_not_finite_are_refused_by_name(tmp_path: Path) -> None:
    file, _ = write_pair(tmp_path, "Q4_0")
    data = bytearray(file.read_bytes())
    info = read_gguf(file).tensors["blk.1.ffn_down.weight"]
    at = bytes(data).index(read_gguf(file).raw(info).tobytes())
    data[at : at + 2] = np.array([np.inf], np.float16).tobytes()
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj\.weight has scales that are not fin"):
        load_target(file, dtype="packed")

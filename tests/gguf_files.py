"""Small GGUF files, written with gguf-py from Hugging Face checkpoints, as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FLOATS = ("F32", "F16", "BF16")
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "MXFP4")
"""Types that gguf-py packs itself. Of the others it only reads, so random blocks stand for them."""
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
"""Where a block of each of the others keeps float16 scales, in bytes."""
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass
class Vocabulary:
    """The tokenizer fields of a file, those without a value left out. kinds None: every token is a normal one."""

    model: str = "gpt2"
    pre: str | None = None
    tokens: list[str] = field(default_factory=list)
    kinds: list[int] | None = None
    merges: list[str] | None = None
    scores: list[float] | None = None
    others: dict[str, int | bool | str] = field(default_factory=dict)

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        if self.tokens:
            writer.add_token_list(self.tokens)
            writer.add_token_types(self.kinds or [NORMAL] * len(self.tokens))
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        for name, value in self.others.items():
            add_field(writer, f"tokenizer.{name}", value)


TEXTS = (
    "In 2024, pi was 3.14159 for 1,000 people.",
    "def f(x):\n    return  12 if x else\t  7\n\n\n",
    "I'LL don't 'S it's ½ ² ٣٤ naïve café — 中文字符 🙂👩‍👧 e\u0301\u00a0x camelCASEWord",
    "<|im_start|>user\nHi 1<|im_end|>\n <|im_start|>assistant\n",
    " <think> a</think>b<|im_end",
    "",
    "  ",
    "a\r\n\r\n b",
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}answer:"
DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)])
NO_VOCABULARY = Vocabulary("none")


def trained(pre_tokenizer: Any = DIGITS) -> Tokenizer:
    """A byte-level BPE with some merges and the tokens of ChatML, as Hugging Face keeps it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False,
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )  # fmt: skip
    tokenizer.train_from_iterator([*TEXTS, " ".join(TEXTS), "return for 12 people in 2024   and  for    all"], trainer)
    tokenizer.add_tokens(["<think>"])
    return tokenizer


def chatml(pre: str | None = "smollm", tokenizer: Tokenizer | None = None, **others: Any) -> Vocabulary:
    """The trained tokenizer as GGUF's metadata."""
    tokenizer = tokenizer or trained()
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=lambda token: ids[token])
    special = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL, "<think>": USER_DEFINED}
    merges = [" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"]]
    fields = {"ggml.bos_token_id": 0, "ggml.eos_token_id": 1, "chat_template": TEMPLATE}
    return Vocabulary("gpt2", pre, tokens, [special.get(t, NORMAL) for t in tokens], merges, None, fields | others)


def add_field(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    writer.add_array(name, value) if isinstance(value, list) else add[type(value)](name, value)


def pack(values: NDArray[np.float32], kind: str, seed: int = 0) -> NDArray[Any]:
    """Values [..., k] in blocks of a type, uint8; float32 and float16 as they are. For a type that gguf-py does not
    pack, random blocks with finite scales."""
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    number = GGMLQuantizationType[kind]
    if kind not in SCALES:
        return quants.quantize(np.ascontiguousarray(values, np.float32), number)
    generator = np.random.default_rng(seed)
    per_block, size = gguf.GGML_QUANT_SIZES[number]
    blocks = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // per_block, size), np.uint8)
    for at in SCALES[kind]:
        scales = generator.uniform(0.0005, 0.002, blocks.shape[:-1]).astype(np.float16)
        blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def unpack(packed: NDArray[Any], kind: str) -> NDArray[np.float32]:
    """What gguf-py reads in packed rows."""
    return np.asarray(quants.dequantize(packed.view(np.uint8), GGMLQuantizationType[kind]), np.float32)


def converter_order(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of queries or keys as llama.cpp's converter orders them (convert_hf_to_gguf.py, LlamaModel.permute)."""
    return (
        rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
    )


def write_fields(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    if config.get("num_local_experts"):
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(config["sliding_window"])
        write_yarn(writer, config["rope_parameters"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config["rope_parameters"]
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])


def write_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def with_experts_stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint with experts as GGUF has them, by the names of qwen3_moe without an expert's number:
    gate, up and down, each [E, outputs, inputs]. Packed ones are uint8 [E, outputs, 17 inputs / 32], as in llama.cpp's
    converter (convert_hf_to_gguf.py, GptOssModel.repack_mxfp4)."""
    found = {}
    separate: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        before, _, own = name.partition(".mlp.experts.")
        if not own:
            found[name] = tensor
        elif own[0].isdigit():
            number, _, rest = own.partition(".")
            separate.setdefault(f"{before}.mlp.experts.{rest}", {})[int(number)] = tensor
        elif not own.endswith("_scales"):
            part, end = own.split("_proj")
            end = ".bias" if end == "_bias" else ".weight"
            if own.endswith("_blocks"):
                tensor = repacked(tensor, tensors[name.replace("_blocks", "_scales")])
            elif end == ".weight":
                tensor = tensor.transpose(1, 2)
            halves = {"gate": tensor[:, ::2], "up": tensor[:, 1::2]} if part == "gate_up" else {part: tensor}
            found |= {f"{before}.mlp.experts.{half}_proj{end}": rows.contiguous() for half, rows in halves.items()}
    return found | {name: torch.stack([own[i] for i in range(len(own))]) for name, own in separate.items()}


def repacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """GGUF's blocks of MXFP4 from Hugging Face's, value by value."""
    inputs = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # one number of 4 bits each
    packed = inputs[..., :16] | (inputs[..., 16:] << 4)
    return torch.cat([scales[..., None], packed], -1).flatten(-2)


def write_gguf_target(
    file: Path,
    directory: Path,
    *,
    kind: Callable[[str], str] = lambda name: "F32",
    vocabulary: Vocabulary = NO_VOCABULARY,
    fields: dict[str, Any] | None = None,
    extra: dict[str, NDArray[Any]] | None = None,
    drop: tuple[str, ...] = (),
) -> dict[str, NDArray[np.float32]]:
    """Write the checkpoint in `directory` as a GGUF file and return the values that it then holds, by the checkpoint's
    names.

    kind: the type of a matrix by its name in the checkpoint; vectors are F32. fields are added, behind the name of the
    architecture where they begin with a dot; extra tensors are added and those in `drop` left out, by GGUF's names."""
    config = json.loads((directory / "config.json").read_text())
    other = {"mistral": "llama", "gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe", "gemma3_text": "gemma3"}
    arch = other.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(file, arch)
    write_fields(writer, config)
    vocabulary.add_to(writer)
    for name, value in (fields or {}).items():
        add_field(writer, f"{arch}{name}" if name.startswith(".") else name, value)
    number = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}[arch]
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    held = {}
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    tensors = with_experts_stacked(load_file(directory / "model.safetensors"))
    for place, (name, tensor) in enumerate(sorted(tensors.items())):
        target = names.get_name(name, (".weight", ".bias"))
        target = f"{target}.weight" if name.endswith("sinks") else target
        if target in drop:
            continue
        is_packed = tensor.dtype == torch.uint8
        stored = "MXFP4" if is_packed else kind(name) if tensor.dim() > 1 and not name.endswith("bias") else "F32"
        one = np.float32(arch == "gemma3" and "norm" in name)  # the converter adds it
        packed = tensor.numpy() if is_packed else pack(tensor.float().numpy() + one, stored, place)
        held[name] = unpack(packed, stored)
        rotated = name.split(".")[-2]
        rows = converter_order(packed, heads[rotated]) if arch == "llama" and rotated in heads else packed
        writer.add_tensor(target, rows, raw_dtype=None if stored in ("F32", "F16") else GGMLQuantizationType[stored])
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return held


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

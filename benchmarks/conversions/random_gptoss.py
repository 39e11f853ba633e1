"""A gpt-oss of full geometry with random weights as a GGUF file, which other engines run too: experts in MXFP4, the
other linears in Q8_0, floats where the real files have them, plain RoPE.

The rotation is plain because engines round YaRN's ramp differently, and weights of another size would lose themselves
in bfloat16: scales of experts are 2^-10 to 2^-6, as in the real weights. The vocabulary is made up, of the real size.

Run: python -m benchmarks.conversions.random_gptoss FILE [--layers 24 --experts 32]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from rich.progress import track
from tokenizers import pre_tokenizers

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2880, 2880, 64, 8, 64, 201_088


@dataclass(frozen=True)
class Geometry:
    """What tells gpt-oss-20b from 120b (36 layers of 128 experts)."""

    layers: int = 24
    experts: int = 32


class Tensor(NamedTuple):
    """One tensor of the file: its shape in numpy's order and how its bytes are made."""

    name: str
    shape: tuple[int, ...]
    kind: Type
    make: Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]


def floats(scale: float, mean: float = 0.0) -> Callable[[np.random.Generator, tuple[int, ...]], NDArray[Any]]:
    """Normal float32 numbers."""
    return lambda rng, shape: (mean + scale * rng.standard_normal(shape, np.float32)).astype(np.float32)


def q8_0(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Blocks of Q8_0 of deviation 0.02."""
    blocks = random_bytes(rng, (*shape[:-1], shape[-1] // 32, 34))
    blocks[..., :2] = np.array([0.02 / 74], np.float16).view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def mxfp4(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[Any]:
    """Blocks of MXFP4 with scales 118 to 122."""
    blocks = random_bytes(rng, (*shape[:-1], shape[-1] // 32, 17))
    blocks[..., 0] = 118 + blocks[..., 0] % 5
    return blocks.reshape(*shape[:-1], -1)


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes, made eight at a time."""
    count = int(np.prod(shape))
    return rng.integers(0, 2**64, -(-count // 8), np.uint64).view(np.uint8)[:count].reshape(shape)


def tensors(geometry: Geometry) -> Iterator[Tensor]:
    """Every tensor, in the order of the file."""
    yield Tensor("token_embd.weight", (VOCAB, HIDDEN), Type.Q8_0, q8_0)
    q, kv, experts = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, geometry.experts
    for layer in range(geometry.layers):
        for name, rows, inputs in (("q", q, HIDDEN), ("k", kv, HIDDEN), ("v", kv, HIDDEN), ("output", HIDDEN, q)):
            yield Tensor(f"blk.{layer}.attn_{name}.weight", (rows, inputs), Type.Q8_0, q8_0)
            yield Tensor(f"blk.{layer}.attn_{name}.bias", (rows,), Type.F32, floats(0.02))
        yield Tensor(f"blk.{layer}.attn_sinks.weight", (HEADS,), Type.F32, floats(1.0))
        for name in ("attn_norm", "post_attention_norm"):
            yield Tensor(f"blk.{layer}.{name}.weight", (HIDDEN,), Type.F32, floats(0.1, 1.0))
        yield Tensor(f"blk.{layer}.ffn_gate_inp.weight", (experts, HIDDEN), Type.F32, floats(0.02))
        yield Tensor(f"blk.{layer}.ffn_gate_inp.bias", (experts,), Type.F32, floats(0.1))
        for name, rows, inputs in (("gate", INNER, HIDDEN), ("up", INNER, HIDDEN), ("down", HIDDEN, INNER)):
            yield Tensor(f"blk.{layer}.ffn_{name}_exps.weight", (experts, rows, inputs), Type.MXFP4, mxfp4)
            yield Tensor(f"blk.{layer}.ffn_{name}_exps.bias", (experts, rows), Type.F32, floats(0.02))
    yield Tensor("output_norm.weight", (HIDDEN,), Type.F32, floats(0.1, 1.0))
    yield Tensor("output.weight", (VOCAB, HIDDEN), Type.Q8_0, q8_0)


def write(file: Path, geometry: Geometry, seed: int = 0) -> None:
    """Write the file, one tensor in memory at a time."""
    writer = gguf.GGUFWriter(file, "gpt-oss")
    add_fields(writer, geometry)
    found = list(tensors(geometry))
    for tensor in found:
        inputs, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        num_bytes = int(np.prod(tensor.shape)) // inputs * size
        dtype = np.dtype(np.float32 if tensor.kind == Type.F32 else np.uint8)
        packed = tensor.shape if tensor.kind == Type.F32 else (*tensor.shape[:-1], tensor.shape[-1] // inputs * size)
        writer.add_tensor_info(tensor.name, packed, dtype, num_bytes, tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, tensor in enumerate(track(found, file.name)):
        writer.write_tensor_data(tensor.make(np.random.default_rng((seed, number)), tensor.shape))
    writer.close()


def add_fields(writer: gguf.GGUFWriter, geometry: Geometry) -> None:
    """The metadata, the made-up vocabulary included: bytes, then numbered words, then Harmony's last tokens."""
    writer.add_context_length(131_072)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(geometry.layers)
    writer.add_feed_forward_length(INNER)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(150_000.0)
    writer.add_sliding_window(128)
    writer.add_expert_count(geometry.experts)
    writer.add_expert_used_count(4)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pair = alphabet[0] + alphabet[1]
    tokens = [*alphabet, pair, *(f"w{i}" for i in range(VOCAB - len(alphabet) - 2)), "<|return|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-4o")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (VOCAB - 1) + [3])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])
    writer.add_eos_token_id(VOCAB - 1)
    writer.add_bos_token_id(VOCAB - 1)


def main() -> None:
    """Write the file that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--layers", type=int, default=Geometry.layers)
    parser.add_argument("--experts", type=int, default=Geometry.experts)
    asked = parser.parse_args()
    write(asked.file, Geometry(asked.layers, asked.experts))


if __name__ == "__main__":
    main()

"""What every written GGUF file has, through gguf-py: the metadata of a decoder, factors of its rotation, tensors.

llama.cpp runs no model without a tokenizer. So a written file has the tokenizer of llama.cpp's own tests: a token's
text is its id in hex, and no token ends a text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aquiline.blocks import Array
from aquiline.models.gguf.metadata import ROPE_FACTORS
from aquiline.models.model_config import ModelConfig
from aquiline.models.rope import rotary

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
"""How matrices are stored, by our names. int8 and int4: in blocks of 32 values, each with a scale."""


def add_decoder(writer: Any, config: ModelConfig) -> None:
    """Add a decoder's metadata, and a tokenizer, to a gguf.GGUFWriter."""
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("test")
    writer.add_token_list([f"{token:x}" for token in range(config.vocab_size)])


def add_rope(writer: Any, config: ModelConfig) -> None:
    """Add the factors by which llama.cpp divides the plain rotary frequencies; nothing for a plain rotation."""
    if config.rope.kind == "default":
        return
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = config.rope.theta**-exponents
    factors = plain / rotary(config.rope, config.head_dim, config.max_positions).inv_freq
    add_tensor(writer, ROPE_FACTORS, factors.astype(np.float32))


def add_tensor(writer: Any, name: str, values: Array, stored: str | None = None) -> None:
    """Add a tensor of floats: a vector as float32, a matrix as `stored` (of STORED) says, None: in its own dtype."""
    from gguf import GGMLQuantizationType, quants

    kind = "F32" if values.ndim == 1 else STORED[stored or values.dtype.name]
    floats = np.ascontiguousarray(values, np.float32)
    if kind == "F32":
        writer.add_tensor(name, floats)
    else:
        number = GGMLQuantizationType[kind]
        writer.add_tensor(name, quants.quantize(floats, number), raw_dtype=number)


def finish(writer: Any) -> None:
    """Write the file and close it."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

"""Shapes of models from their config.json, also of families that nothing here runs: counting needs no weights.

`models/families.py` holds what a family's code implies and its configuration does not say. An unknown family is counted
as llama-like, with a note. Models that cannot be counted this way are refused. Source: transformers 5.23,
configuration_*.py and modeling_*.py of the families named.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from aquiline.blocks import BLOCK_TYPES
from aquiline.errors import CheckpointError
from aquiline.models.families import (
    EXPERT_COUNTS,
    EXPERTS_PER_TOKEN,
    FAMILIES,
    UNKNOWN,
    Family,
    config_file,
    field_among,
    read_fields,
)
from aquiline.models.files import is_gguf, is_hub_id, resolve
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.json_fields import MAX_LAYERS, Raw, count, flag, nested, texts
from aquiline.models.known_pairs import draft_of, target_of
from aquiline.models.model_config import LAYER_IDS, DraftConfig, ModelConfig
from aquiline.models.producers import FC_NORM_FLAGS, find_format, is_windowed, read_draft_fields
from aquiline.models.shape import (
    AttentionShape,
    BodyShape,
    Dense,
    DraftShape,
    LayerShape,
    Matrix,
    ModelShape,
    MoE,
    Precision,
    Storage,
    precision_of,
)

_UNCOUNTED = ("kv_lora_rank", "mamba_d_state", "state_size", "linear_num_key_heads", "is_encoder_decoder")


def read_shape(model: str | Path, dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """The shape of a model: a directory, a config.json, a hub id or a GGUF file. Its weights count as stored in
    `dtype`, by default as the configuration says, or as the blocks of a GGUF file are.

    Raises CheckpointError naming file, field and value, ValueError for an unknown dtype."""
    file = shape_file(model)
    types = _block_types(file) if dtype is None and is_gguf(file) else dtype
    return shape_of_fields(read_fields(file), file, types, kv_dtype)


def shape_of_fields(outer: Raw, file: Path, dtype: str | None = None, kv_dtype: str | None = None) -> ModelShape:
    """The shape that the fields of a config.json describe. file: named in errors."""
    raw = nested(outer, file, "text_config") or outer
    family = str(raw.get("model_type", "llama"))
    for name in _UNCOUNTED:
        if raw.get(name):
            raise CheckpointError(
                f"{file}: {name}={raw[name]!r} ({family}) is not counted; supported are decoders whose every layer "
                "keeps keys and values per head"
            )
    facts, hidden = FAMILIES.get(family, UNKNOWN), count(raw, file, "hidden_size")
    layers = _layers(raw, file, facts)
    is_moe = any(layer.num_experts for layer in layers)
    own = precision_of(dtype, kv_dtype, is_moe=is_moe) if dtype else _own_precision(raw | outer, file, kv_dtype, is_moe)
    unknown = f"family {family!r} is not known here: counted as llama-like, with a gated MLP and two norms a layer"
    return ModelShape(
        family=family,
        body=BodyShape(hidden, layers, Matrix(count(raw, file, "vocab_size"), hidden), hidden, own),
        tied_head=flag(outer | raw, file, "tie_word_embeddings", facts.tied_head),
        max_positions=count(raw, file, "max_position_embeddings") if raw.get("max_position_embeddings") else None,
        assumptions=() if family in FAMILIES else (unknown,),
    )


def read_draft_shape(draft: str | Path, target: ModelShape) -> DraftShape:
    """The shape of an EAGLE-3 head's config.json, in any of the layouts that models/producers.py names. It is stored as
    the target is.

    Raises CheckpointError naming file, field and value, also if it is no draft of this target."""
    file = shape_file(draft_of(draft))
    outer = read_draft_fields(file)
    raw = nested(outer, file, "transformer_layer_config") or outer
    if count(raw, file, "num_hidden_layers") != 1:
        raise CheckpointError(f"{file}: num_hidden_layers={raw['num_hidden_layers']}; an EAGLE-3 head has 1")
    hidden, vocab = count(raw, file, "hidden_size"), count(raw, file, "vocab_size")
    features = count(outer, file, "target_hidden_size", hidden)
    for name, found, wanted in (
        ("target_hidden_size" if outer.get("target_hidden_size") else "hidden_size", features, target.body.hidden_size),
        ("vocab_size", vocab, target.vocab_size),
    ):
        if found != wanted:
            raise CheckpointError(f"{file}: {name}={found}, the target has {wanted}; name its own draft, or none")
    eagle = outer | nested(outer, file, "eagle_config")
    ids = eagle.get(LAYER_IDS) or (0, 1, 2)
    if not isinstance(ids, list | tuple):
        raise CheckpointError(f"{file}: {LAYER_IDS}={ids!r} must be a list of layer numbers")
    has_norm = any(flag(eagle, file, name) for name in FC_NORM_FLAGS)
    window = count(raw, file, "sliding_window") if is_windowed(raw, find_format(outer, file)[0], file) else 0
    attention = _attention(raw, file, UNKNOWN, inputs=2 * hidden, window=window)
    layer = LayerShape(attention, Dense(hidden, count(raw, file, "intermediate_size")))
    draft_vocab = count(outer, file, "draft_vocab_size", vocab)
    return draft_shape(layer, draft_vocab, len(ids) * features, target, has_norm=has_norm)


def assumed_draft(target: ModelShape) -> DraftShape:
    """The EAGLE-3 head that would be trained for this target: the target's attention heads, the MLP width that one
    token uses, three features, and a vocabulary of at most 32000 tokens."""
    hidden, first = target.body.hidden_size, target.body.layers[0]
    width = first.mlp.width
    attention = replace(
        first.attention, inputs=2 * hidden, qkv_bias=False, o_bias=False, qk_norm=False, sinks=False, window=0
    )
    said = f"no draft is named: an EAGLE-3 head with an MLP of {width} and the target's heads is assumed"
    layer = LayerShape(attention, Dense(hidden, width))
    return replace(draft_shape(layer, min(32000, target.vocab_size), 3 * hidden, target), assumptions=(said,))


def shape_of(config: ModelConfig, dtype: str = "bfloat16") -> ModelShape:
    """The shape of a target this package runs."""
    hidden = config.hidden_size
    layers = tuple(_layer_of(config, i, hidden) for i in range(config.num_layers))
    return ModelShape(
        family=config.family, tied_head=config.tied_head, max_positions=config.max_positions,
        body=BodyShape(
            hidden, layers, Matrix(config.vocab_size, hidden), hidden,
            precision_of(dtype, is_moe=config.experts is not None),
        ),
    )  # fmt: skip


def draft_shape_of(config: DraftConfig, target: ModelShape) -> DraftShape:
    """The shape of a draft this package runs, stored as its target is."""
    layer = _layer_of(config.model, 0, 2 * config.model.hidden_size)
    features = len(config.capture) * config.target_hidden_size
    has_norm = config.norm_before_fc or config.fc_norm
    return draft_shape(layer, config.draft_vocab_size, features, target, has_norm=has_norm)


def shape_file(model: str | Path) -> Path:
    """The file with a model's fields: the config.json or GGUF file of a known pair's target or of a directory, the file
    itself, or the config.json of a hub id, of which only this file is fetched.

    Raises CheckpointError if `model` is none of them."""
    path = Path(target_of(model)).expanduser()
    if path.is_dir():
        return config_file(resolve(path))
    if path.is_file():
        return path
    if not is_hub_id(str(model)):
        raise CheckpointError(f"{model} is neither a directory nor a config.json nor a Hugging Face id (owner/name)")
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        cached = try_to_load_from_cache(str(model), "config.json")
        return Path(cached if isinstance(cached, str) else hf_hub_download(str(model), "config.json"))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{model} is no directory or config.json here, and the Hugging Face hub did not give its config.json: "
            f"{error}. Check the name and the network"
        ) from error


def draft_shape(
    layer: LayerShape, vocab: int, features: int, target: ModelShape, *, has_norm: bool = False
) -> DraftShape:
    """An EAGLE-3 head of one layer over that many features, stored as its target is. It shares the target's embedding
    where their widths agree."""
    hidden = layer.attention.hidden_size
    own = 0 if hidden == target.body.hidden_size else target.vocab_size * hidden
    num_vector = 2 * hidden + features * has_norm
    body = BodyShape(hidden, (layer,), Matrix(vocab, hidden), num_vector, target.body.precision)
    return DraftShape(body, fc=Matrix(hidden, features), num_embedding=own)


def _layer_of(config: ModelConfig, index: int, inputs: int) -> LayerShape:
    attention = AttentionShape(
        config.hidden_size, inputs, config.num_heads, config.num_kv_heads, config.head_dim, config.qkv_bias,
        config.o_bias, config.qk_norm, config.sinks, config.window(index),
    )  # fmt: skip
    experts = config.experts
    if experts is None:
        mlp = Dense(config.hidden_size, config.intermediate_size, config.mlp_bias)
        return LayerShape(attention, mlp, 4 if config.output_norms else 2)
    expert = Dense(config.hidden_size, config.intermediate_size, experts.has_bias)
    return LayerShape(attention, MoE(expert, experts.count, experts.per_token, experts.has_bias))


def _block_types(file: Path) -> str | None:
    """How a GGUF file stores most of its layers and its head, as precision_of takes it; None if layers are floats."""
    tensors = read_gguf(file).tensors
    sizes: Counter[str] = Counter()
    for name, info in tensors.items():
        if name.startswith("blk.") and info.type_name in BLOCK_TYPES:
            sizes[info.type_name.lower()] += info.num_bytes
    if not sizes:
        return None
    head = (tensors.get("output.weight") or tensors["token_embd.weight"]).type_name
    return f"{sizes.most_common(1)[0][0]}+{head.lower() if head in BLOCK_TYPES else 'bfloat16'}"


def _attention(raw: Raw, file: Path, facts: Family, inputs: int | None = None, window: int = 0) -> AttentionShape:
    hidden, heads = count(raw, file, "hidden_size"), count(raw, file, "num_attention_heads")
    has_bias = not facts.qkv_bias and flag(raw, file, "attention_bias", facts.attention_bias)
    return AttentionShape(
        hidden, inputs or hidden, heads, count(raw, file, "num_key_value_heads", facts.num_kv_heads or heads),
        count(raw, file, "head_dim", facts.head_dim or hidden // heads), has_bias or facts.qkv_bias, has_bias,
        facts.qk_norm, facts.sinks, window,
    )  # fmt: skip


def _layers(raw: Raw, file: Path, facts: Family) -> tuple[LayerShape, ...]:
    attention, hidden = _attention(raw, file, facts), count(raw, file, "hidden_size")
    num = count(raw, file, "num_hidden_layers", most=MAX_LAYERS)
    sparse = _sparse_layers(raw, file, num)
    kinds: dict[bool, Dense | MoE] = {}
    if not all(sparse):
        kinds[False] = Dense(hidden, count(raw, file, "intermediate_size"), flag(raw, file, "mlp_bias"))
    if any(sparse):
        kinds[True] = _experts(raw, file, facts)
    return tuple(
        LayerShape(replace(attention, window=window), kinds[is_sparse], facts.num_norms)
        for is_sparse, window in zip(sparse, _windows(raw, file, facts, num), strict=True)
    )


def _experts(raw: Raw, file: Path, facts: Family) -> MoE:
    hidden = count(raw, file, "hidden_size")
    num_experts = max(count(raw, file, name, 0, least=0) for name in EXPERT_COUNTS)
    name = field_among(raw, EXPERTS_PER_TOKEN)
    per_token = count(raw, file, name)
    if per_token > num_experts:
        raise CheckpointError(f"{file}: {name}={per_token} exceeds the {num_experts} experts")
    width = count(raw, file, "moe_intermediate_size" if raw.get("moe_intermediate_size") else "intermediate_size")
    shared, has_gate = None, bool(raw.get("shared_expert_intermediate_size"))
    if has_gate:  # qwen2_moe's
        shared = Dense(hidden, count(raw, file, "shared_expert_intermediate_size"))
    elif raw.get("n_shared_experts"):
        shared = Dense(hidden, count(raw, file, "n_shared_experts") * width)
    expert = Dense(hidden, width, facts.expert_bias)
    return MoE(expert, num_experts, per_token, facts.expert_bias, shared, has_gate)


def _sparse_layers(raw: Raw, file: Path, num_layers: int) -> list[bool]:
    """Which layers have experts."""
    if not any(count(raw, file, name, 0, least=0) for name in EXPERT_COUNTS):
        return [False] * num_layers
    dense, step = raw.get("mlp_only_layers") or [], count(raw, file, "decoder_sparse_step", 1, least=0) or 1
    if not isinstance(dense, list):
        raise CheckpointError(f"{file}: mlp_only_layers={dense!r} must be a list of layer numbers")
    first = count(raw, file, "first_k_dense_replace", 0, least=0)
    return [i >= first and i not in dense and (i + 1) % step == 0 for i in range(num_layers)]


def _windows(raw: Raw, file: Path, facts: Family, num_layers: int) -> list[int]:
    """Per layer, 0 for none."""
    by_family = 0 if "sliding_window" in raw else facts.window
    window = count(raw, file, "sliding_window", by_family, least=0)
    if types := texts(raw, file, "layer_types"):
        known = {"full_attention": 0, "sliding_attention": window}
        if len(types) != num_layers or not set(types) <= set(known):
            raise CheckpointError(f"{file}: layer_types={types!r}; counted are {num_layers} of {', '.join(known)}")
        return [known[kind] for kind in types]
    every = count(raw, file, "sliding_window_pattern", facts.full_every, least=0)
    if not flag(raw, file, "use_sliding_window", every > 0):
        return [0] * num_layers
    first = count(raw, file, "max_window_layers", 28, least=0) if every == 0 else 0
    return [window if i >= first and (every < 2 or (i + 1) % every) else 0 for i in range(num_layers)]


def _own_precision(raw: Raw, file: Path, kv_dtype: str | None, is_moe: bool) -> Precision:
    """The precision in which the checkpoint was saved. A quantised checkpoint's head is not quantised."""
    name = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str):
        raise CheckpointError(f"{file}: dtype={name!r} must be a text")
    quantised = nested(raw, file, "quantization_config")
    if not quantised:
        return precision_of(name, kv_dtype)
    method = quantised.get("quant_method")
    if method == "mxfp4":
        return precision_of("mxfp4", kv_dtype, is_moe=is_moe)
    if method in ("fp8", "fbgemm_fp8"):
        return precision_of("fp8", kv_dtype)
    if method in ("awq", "gptq") and quantised.get("bits") is not None:
        bits = count(quantised, file, "bits", most=16)
        group = max(0, count(quantised, file, "group_size", 128, least=-1))
        storage = Storage(f"int{bits} ({method})", bits, 16 + bits, group)  # a float16 scale and a zero point
        return replace(precision_of("bfloat16", kv_dtype), layers=storage, experts=storage)
    raise CheckpointError(
        f"{file}: quantization_config.quant_method={method!r} is not known; say how weights are stored with --dtype"
    )

"""The target families and how their config.json is read: old and transformers-5 style, into one ModelConfig.

What a family means is data (`FAMILIES`), for the loader here and for the arithmetic of `aquiline limits`; whatever a
config asks for beyond what runs is refused, naming field and value.
The metadata of a GGUF file come as the fields of a config.json (`gguf/metadata.py`) and are read like one.
Source: transformers 5.23, models/{llama,mistral,qwen2,qwen3,gpt_oss,qwen3_moe,gemma3}/configuration_*.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from aquiline.errors import CheckpointError
from aquiline.models.files import is_gguf, read_json, resolve
from aquiline.models.gguf.draft_file import is_draft_file
from aquiline.models.gguf.metadata import config_fields
from aquiline.models.gguf.reader import read_gguf
from aquiline.models.json_fields import MAX_EXPERTS, MAX_LAYERS, Raw, count, flag, nested, number, texts, token_ids
from aquiline.models.model_config import Activation, Experts, ModelConfig
from aquiline.models.producers import draft_mark
from aquiline.models.rope_fields import read_ropes


@dataclass(frozen=True)
class Family:
    """What a family's code implies and its config.json does not say.

    architecture: the class that config.json names, for families that run here; "" for those whose shapes are only
    counted (`aquiline limits`). windows: which layers have a sliding window: none, all, those that the config lists, or
    all but every n-th. head_dim, num_kv_heads and window (the window's size in tokens) apply if the config names none;
    head_dim = 0 means hidden_size / num_attention_heads, num_kv_heads = 0 means num_attention_heads. biases: *_bias
    flags of the config that add weights, those of attention to q, k, v and o; attention_bias: that flag where a config
    does not have it. bias_ignored: *_bias flags that change nothing.

    num_norms: of a layer; with four, the outputs of attention and MLP are normed too. norms_from_one: checkpoints hold
    what is added to 1. scales_embedding: by the square root of hidden_size. attention_scalar: query_pre_attn_scalar of
    a config that names none; 0: only head_dim counts.

    Experts that run: expert_size names the field with the width of one. weights_over_all: their weights are
    probabilities among all experts unless the config says norm_topk_prob. swiglu_limit: that of the clamped activation
    where the config names none. quantised: methods of a quantization_config that are read. rope: the rotation of a
    config that names none. local_rope: that of layers with a window, if it is another."""

    architecture: str = ""
    qkv_bias: bool = False
    attention_bias: bool = False  # of q, k, v and o
    expert_bias: bool = False  # of experts and router
    qk_norm: bool = False
    sinks: bool = False
    num_norms: int = 2
    norms_from_one: bool = False
    scales_embedding: bool = False
    attention_scalar: float = 0.0
    activation: Activation = "swiglu"
    tied_head: bool = False
    head_dim: int = 0
    num_kv_heads: int = 0
    windows: Literal["none", "all", "listed"] | int = "none"
    window: int = 0
    biases: tuple[str, ...] = ()
    bias_ignored: tuple[str, ...] = ()
    expert_size: str = ""
    weights_over_all: bool = False
    swiglu_limit: float = 0.0
    quantised: tuple[str, ...] = ()
    rope: Raw = field(default_factory=dict)
    local_rope: Raw = field(default_factory=dict)

    @property
    def full_every(self) -> int:
        """Which layers of a model with sliding windows have none. n > 1: every n-th layer; 1: no layer; 0: those that
        the config lists."""
        return self.windows if isinstance(self.windows, int) else int(self.windows == "all")


_GPT_OSS_ROPE: Raw = {
    "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", biases=("attention_bias", "mlp_bias")),
    "mistral": Family("MistralForCausalLM", windows="all", window=4096, num_kv_heads=8),
    "qwen2": Family(
        "Qwen2ForCausalLM", qkv_bias=True, windows="listed", window=4096, num_kv_heads=32,
        bias_ignored=("attention_bias",),
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", qk_norm=True, windows="listed", window=4096, head_dim=128, num_kv_heads=32,
        biases=("attention_bias",),
    ),
    "mixtral": Family(num_kv_heads=8, windows="all"),
    "qwen2_moe": Family(qkv_bias=True, num_kv_heads=16),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", qk_norm=True, num_kv_heads=4, biases=("attention_bias",),
        expert_size="moe_intermediate_size", weights_over_all=True,
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", attention_bias=True, expert_bias=True, sinks=True, head_dim=64, num_kv_heads=8, windows=2,
        window=128, biases=("attention_bias",), expert_size="intermediate_size", activation="clamped", swiglu_limit=7.0,
        quantised=("mxfp4",), rope=_GPT_OSS_ROPE,
    ),
    "gemma2": Family(num_norms=4, tied_head=True, head_dim=256, windows=2, window=4096),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", qk_norm=True, num_norms=4, norms_from_one=True, scales_embedding=True, tied_head=True,
        head_dim=256, num_kv_heads=4, windows=6, window=4096, attention_scalar=256.0, activation="geglu",
        biases=("attention_bias",), rope={"rope_theta": 1e6}, local_rope={"rope_theta": 10000.0},
    ),
    "phi3": Family(windows="all"),
}  # fmt: skip
"""The families by the model_type of their config.json. Those with an architecture run."""

UNKNOWN = Family(windows="all")
"""What any other family counts as."""

EOS = "eos_token_id"
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
"""The names under which configs have these two; the first that a config has counts."""
_BESIDE_EXPERTS: Raw = {"mlp_only_layers": [], "decoder_sparse_step": 1, "use_sliding_window": False}
"""Fields of configs with experts of which one value is supported: every layer has experts, and windows are the
family's."""
_SWIGLU_ALPHA = 1.702
_ACTIVATIONS = {"geglu": ("hidden_activation", "gelu_pytorch_tanh")}
"""The field that names a family's activation, and the one value that runs, where these are not hidden_act and silu."""
_NO_TARGET = (
    "this is no target: it is an EAGLE-3 draft ({}); name it as the draft, and as the target the model that it was "
    "trained for"
)
_INNER = ("text_config", "llm_config", "language_config", "thinker_config")
"""Fields in which models of several kinds of input have their text model's config."""
_ABSENT = ("attn_logit_softcapping", "final_logit_softcapping")


def read_model_config(path: str | Path) -> ModelConfig:
    """The ModelConfig of a target: a Hugging Face directory or hub id, end tokens of generation_config.json included,
    or a GGUF file.

    Raises CheckpointError naming file, field, value and what is supported."""
    file = config_file(resolve(path))
    raw, generation = read_fields(file), file.with_name("generation_config.json")
    return model_config(raw, file, read_json(generation) if generation.exists() and not is_gguf(file) else {})


def model_config(raw: Raw, file: Path, extra: Raw) -> ModelConfig:
    """The ModelConfig of a target from the fields of its config and of its generation config (`extra`). `file`: what
    errors name.

    Raises CheckpointError naming file, field, value and what is supported."""
    family, generation = _family(raw, file), file.with_name("generation_config.json")
    refuse_features(raw, file, FAMILIES[family])
    vocab_size = count(raw, file, "vocab_size")
    eos = (*token_ids(raw, file, EOS, vocab_size), *token_ids(extra, generation, EOS, vocab_size))
    return geometry(raw, file, family, eos)


def config_file(checkpoint: Path) -> Path:
    """The file that says what a checkpoint is: a directory's config.json, or a GGUF file itself."""
    return checkpoint if is_gguf(checkpoint) else checkpoint / "config.json"


def has_blocks(checkpoint: Path) -> bool:
    """Whether a checkpoint that `resolve` found may hold packed blocks: a GGUF file, or experts in MXFP4."""
    file = config_file(checkpoint)
    return is_gguf(file) or bool(nested(read_fields(file), file, "quantization_config"))


def read_fields(file: Path) -> Raw:
    """The fields of a config.json, or those that a GGUF file's metadata stand for.

    Raises CheckpointError for a file that is missing or broken, for metadata that are not supported, and for a draft
    where a target is wanted."""
    if is_gguf(file):
        gguf = read_gguf(file)
        if is_draft_file(gguf):
            raise CheckpointError(f"{file}: {_NO_TARGET.format('general.architecture=eagle3')}")
        return config_fields(gguf)
    raw = read_json(file)
    if (mark := draft_mark(raw)) is not None:
        raise CheckpointError(f"{file}: {_NO_TARGET.format(mark)}")
    return raw


def geometry(raw: Raw, file: Path, family: str, eos: tuple[int, ...] = ()) -> ModelConfig:
    """A ModelConfig from raw config fields under Hugging Face names. Raises CheckpointError on missing or odd ones."""
    kind = FAMILIES[family]
    layers = count(raw, file, "num_hidden_layers", most=MAX_LAYERS)
    heads, kv_heads, head_dim = _heads(raw, file, kind)
    max_positions = count(raw, file, "max_position_embeddings")
    windows = _windows(raw, file, kind, layers)
    rope, local_rope = read_ropes(raw, file, max_positions, kind.rope, kind.local_rope)
    if rope.kind == "factors" and len(rope.factors) != head_dim // 2:
        raise CheckpointError(f"{file}: {len(rope.factors)} rope factors; head_dim={head_dim} takes {head_dim // 2}")
    attention_bias = "attention_bias" in kind.biases and flag(raw, file, "attention_bias", kind.attention_bias)
    return ModelConfig(
        family=family,
        vocab_size=count(raw, file, "vocab_size"),
        hidden_size=count(raw, file, "hidden_size"),
        intermediate_size=count(raw, file, kind.expert_size or "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        rms_norm_eps=number(raw.get("rms_norm_eps", 1e-6), file, "rms_norm_eps"),
        rope=rope,
        qkv_bias=kind.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias="mlp_bias" in kind.biases and flag(raw, file, "mlp_bias"),
        sinks=kind.sinks,
        qk_norm=kind.qk_norm,
        output_norms=kind.num_norms == 4,
        tied_head=flag(raw, file, "tie_word_embeddings", kind.tied_head),
        windows=windows,
        local_rope=local_rope if windows else None,
        activation=kind.activation,
        activation_limit=_limit(raw, file, kind),
        embed_scale=count(raw, file, "hidden_size") ** 0.5 if kind.scales_embedding else 1.0,
        query_pre_attn_scalar=_attention_scalar(raw, file, kind),
        experts=_experts(raw, file, kind, layers) if kind.expert_size else None,
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=next(iter(token_ids(raw, file, "bos_token_id")), None),
    )


def _heads(raw: Raw, file: Path, kind: Family) -> tuple[int, int, int]:
    """Heads of the queries, of keys and values, and their width."""
    heads = count(raw, file, "num_attention_heads")
    by_family = kind.num_kv_heads if "num_key_value_heads" not in raw else 0  # null stands for all heads
    kv_heads = count(raw, file, "num_key_value_heads", by_family or heads)
    head_dim = count(raw, file, "head_dim", kind.head_dim or count(raw, file, "hidden_size") // heads)
    if heads % kv_heads:
        raise CheckpointError(f"{file}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}")
    if head_dim % 2:
        raise CheckpointError(f"{file}: head_dim={head_dim} is odd; rotary embedding needs pairs")
    return heads, kv_heads, head_dim


def _experts(raw: Raw, file: Path, kind: Family, layers: int) -> Experts:
    """The experts of every layer. Raises CheckpointError for layers without experts, and for another activation."""
    for name, supported in _BESIDE_EXPERTS.items():
        if raw.get(name) not in (None, supported):
            raise CheckpointError(f"{file}: {name}={raw[name]!r} is not supported beside experts; use {supported!r}")
    of_total, of_token = (field_among(raw, names) for names in (EXPERT_COUNTS, EXPERTS_PER_TOKEN))
    total, per_token = count(raw, file, of_total, most=MAX_EXPERTS // layers), count(raw, file, of_token)
    if per_token > total:
        raise CheckpointError(f"{file}: {of_token}={per_token} exceeds {of_total}={total}")
    over_all = kind.weights_over_all and not flag(raw, file, "norm_topk_prob")
    return Experts(total, per_token, kind.expert_bias, over_all)


def _limit(raw: Raw, file: Path, kind: Family) -> float:
    """The limit of the clamped activation; 0 for another one."""
    if kind.activation != "clamped":
        return 0.0
    if raw.get("swiglu_alpha") not in (None, _SWIGLU_ALPHA):
        raise CheckpointError(f"{file}: swiglu_alpha={raw['swiglu_alpha']!r}; supported is {_SWIGLU_ALPHA}")
    own = raw.get("swiglu_limit")
    return kind.swiglu_limit if own is None else number(own, file, "swiglu_limit")


def _attention_scalar(raw: Raw, file: Path, kind: Family) -> float | None:
    own = raw.get("query_pre_attn_scalar")
    if not kind.attention_scalar:
        return None
    return kind.attention_scalar if own is None else number(own, file, "query_pre_attn_scalar")


def field_among(raw: Raw, names: tuple[str, ...]) -> str:
    """The first of these names that a config has, or else the first of all."""
    return next((name for name in names if raw.get(name)), names[0])


def refuse_features(raw: Raw, file: Path, kind: Family | None = None) -> None:
    """Raise CheckpointError for the first thing a config switches on that no decoder here does, or that this kind of
    decoder does not."""
    kind = kind or Family()
    name, supported = _ACTIVATIONS.get(kind.activation, ("hidden_act", "silu"))
    if raw.get(name, supported) != supported:
        raise CheckpointError(f"{file}: {name}={raw[name]!r}; supported is {supported!r}")
    for name in _ABSENT:
        if raw.get(name) is not None:
            raise CheckpointError(f"{file}: {name}={raw[name]!r} is not supported; supported is null")
    if quantised := nested(raw, file, "quantization_config"):
        method = quantised.get("quant_method", "unknown")
        if method not in kind.quantised:
            raise CheckpointError(
                f"{file}: quantization_config (quant_method={method!r}) is not supported; use the bfloat16 checkpoint"
            )
    for name in () if kind.expert_size else EXPERT_COUNTS + EXPERTS_PER_TOKEN:
        if raw.get(name):
            raise CheckpointError(f"{file}: {name}={raw[name]!r}; mixture-of-experts layers are not supported")
    for name in ("attention_bias", "mlp_bias"):
        if flag(raw, file, name) and name not in kind.biases + kind.bias_ignored:
            own = raw.get("model_type")
            raise CheckpointError(f"{file}: {name}=true adds biases that {own} does not have here; supported is false")
    for name in ("use_mrope", "use_bidirectional_attention"):
        if flag(raw, file, name):
            raise CheckpointError(f"{file}: {name}=true is not supported; supported is false")


def _family(raw: Raw, file: Path) -> str:
    family, architectures = raw.get("model_type"), texts(raw, file, "architectures")
    supported = ", ".join(kind.architecture for kind in FAMILIES.values() if kind.architecture)
    for name in _INNER:
        if isinstance(raw.get(name), dict):
            raise CheckpointError(
                f"{file}: {name} holds the text model (model_type={raw[name].get('model_type')!r}) of {family!r}; "
                f"supported are checkpoints of a text model alone, {supported}: save its config and weights apart"
            )
    if not isinstance(family, str) or not FAMILIES.get(family, UNKNOWN).architecture:
        raise CheckpointError(
            f"{file}: model_type={family!r}, architectures={architectures!r}; supported are {supported}"
        )
    expected = FAMILIES[family].architecture
    if architectures and architectures != [expected]:
        raise CheckpointError(f"{file}: architectures={architectures!r}; supported are {supported}")
    return family


def _windows(raw: Raw, file: Path, kind: Family, layers: int) -> tuple[int, ...]:
    """Per layer, 0 for none; empty when no layer has one. A missing sliding_window means 4096, as in transformers."""
    if kind.windows == "none" or (kind.windows == "listed" and not flag(raw, file, "use_sliding_window")):
        _check_types(raw, file, layers, {"full_attention"} if kind.windows == "listed" else None)
        return ()
    if raw.get("sliding_window", kind.window) is None:
        if _check_types(raw, file, layers, {"full_attention"}) is None and kind.full_every > 1:
            raise CheckpointError(f"{file}: sliding_window is null; name its size, or layer_types that are all full")
        return ()
    window = count(raw, file, "sliding_window", kind.window)
    if kind.windows == "all":
        _check_types(raw, file, layers, {"sliding_attention"})
        return (window,) * layers
    types = _check_types(raw, file, layers, {"full_attention", "sliding_attention"})
    if types is None and kind.full_every > 1:
        every = count(raw, file, "sliding_window_pattern", kind.full_every)
        types = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    if types is None:
        first = count(raw, file, "max_window_layers", 28, least=0)
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    windows = tuple(window if name == "sliding_attention" else 0 for name in types)
    return windows if any(windows) else ()


def _check_types(raw: Raw, file: Path, layers: int, allowed: set[str] | None) -> list[str] | None:
    types = raw.get("layer_types")
    if types is None or allowed is None:
        return None
    if not isinstance(types, list) or len(types) != layers or not all(name in sorted(allowed) for name in types):
        raise CheckpointError(
            f"{file}: layer_types={types!r}; supported here are {layers} entries of {', '.join(sorted(allowed))}"
        )
    return types

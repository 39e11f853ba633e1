"""What a decoder is, in the few fields that tell the families apart. load.py and formats.py read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from aquiline.blocks import FLOATS


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base and scaling. `kind` is default, linear, llama3, yarn or factors; `parameters` are its own
    fields under their Hugging Face names (factor, low_freq_factor, original_max_position_embeddings, ...). `factors`
    belong to the kind of that name: what each of the Dh / 2 plain frequencies is divided by."""

    theta: float = 10000.0
    kind: str = "default"
    parameters: dict[str, float] = field(default_factory=dict)
    factors: tuple[float, ...] = ()


Activation = Literal["swiglu", "clamped", "geglu"]
"""What an MLP makes of gate and up. swiglu: silu(gate) * up. clamped: gpt-oss's (up + 1) * gate * sigmoid(1.702 gate),
gate at most a limit and up within it. geglu: gelu(gate) * up, gelu by its tanh form."""


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of a layer's MLP: each row is computed by the `per_token` experts that the router
    scores highest, ties to the lowest id, and adds up their outputs, weighted."""

    count: int
    per_token: int
    has_bias: bool = False  # of the router and of every expert's gate, up and down
    over_all: bool = False  # weights are softmax probabilities among all experts; false: among the chosen ones


@dataclass(frozen=True)
class ModelConfig:
    """Geometry and flags of one decoder; the same fields describe a target and a draft's own layer."""

    family: str  # a name of FAMILIES in families.py
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # of gate, up and down
    sinks: bool = False  # a logit per head in the softmax's denominator
    qk_norm: bool = False  # qwen3: one RMS norm per head on q and k, before the rotation
    output_norms: bool = False  # gemma3: norms also of what attention and MLP add to the residual stream
    tied_head: bool = False
    windows: tuple[int, ...] = ()  # per layer, 0 for none; empty: none anywhere
    local_rope: RopeConfig | None = None  # of layers with a window; None: that of all layers
    activation: Activation = "swiglu"
    activation_limit: float = 0.0  # of the clamped one
    embed_scale: float = 1.0  # a factor on embeddings
    query_pre_attn_scalar: float | None = None  # scores are divided by its square root; None: by that of head_dim
    experts: Experts | None = None  # of every layer; None: dense layers
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token, all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_dtype: str) -> int:
        """Bytes of these numbers: in int8 with a float32 scale for each key and each value of a head."""
        if kv_dtype == "int8":
            return self.kv_values_per_token + self.kv_values_per_token // self.head_dim * 4
        return self.kv_values_per_token * FLOATS[kv_dtype].itemsize

    @property
    def attention_scale(self) -> float:
        """What products of queries and keys are multiplied by."""
        return float((self.query_pre_attn_scalar or self.head_dim) ** -0.5)

    @property
    def draft_layer(self) -> ModelConfig:
        """The layer of an EAGLE-3 head as heads are published, whatever this model's layers have: a dense llama layer
        with the same attention heads and rotation, and the width of the experts that one row uses.

        Source: nvidia/gpt-oss-120b-Eagle3 and SpecForge's gpt-oss-20B-eagle3.json, whose layers are dense."""
        width = self.intermediate_size * (1 if self.experts is None else self.experts.per_token)
        return ModelConfig(
            "llama", self.vocab_size, self.hidden_size, width, 1, self.num_heads, self.num_kv_heads, self.head_dim,
            self.max_positions, self.rms_norm_eps, self.rope, eos_token_ids=self.eos_token_ids,
            bos_token_id=self.bos_token_id,
        )  # fmt: skip

    def window(self, layer: int) -> int:
        """Sliding window of a layer in positions, the current one included; 0 means none."""
        return self.windows[layer] if self.windows else 0


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
"""The field of configs that names the layers a draft captures, in the numbering of its producer."""


@dataclass(frozen=True)
class DraftConfig:
    """An EAGLE-3 draft head. Source: arXiv 2503.01840; SafeAILab/EAGLE@cb7e084 and SpecForge@a6b6b02 for the flags."""

    model: ModelConfig  # its own geometry, RoPE and norm; num_layers is 1, vocab_size the target's
    draft_vocab_size: int
    target_hidden_size: int
    capture: tuple[int, ...]  # target layers whose OUTPUT is a feature, ascending: the one canonical numbering
    norm_before_fc: bool = False  # one norm over the concatenated features before fc
    fc_norm: bool = False  # one norm per captured feature before fc (EAGLE-3.1)
    norm_before_residual: bool = False  # the layer's residual is the normed feature, not the raw one
    norm_feedback: bool = False  # the next pass is fed the normed output (EAGLE-3.1), not the raw one


def default_capture(num_layers: int) -> tuple[int, ...]:
    """The three layers EAGLE-3 reads: inputs of {2, L//2, L-3}, that is outputs of {1, L//2-1, L-4}.

    Raises ValueError below 7 layers, where they collide and must be chosen explicitly."""
    if num_layers < 7:
        raise ValueError(f"num_layers={num_layers}: default capture layers collide below 7; name three explicitly")
    return (1, num_layers // 2 - 1, num_layers - 4)

"""Sizes of a target and its draft from a few numbers, without weights: parameters and multiplications per token.

A recipe gives the numbers of a target, also of families that this version cannot load; so a run can be estimated
before anything is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from aquiline.checks import check_fields
from aquiline.models.config import ModelConfig
from aquiline.train.config import TrainConfig
from aquiline.train.vocabulary import DEFAULT_SIZE


@dataclass(frozen=True)
class TargetShape:
    """A decoder with attention and a gated MLP in every layer. With experts, intermediate_size is that of one expert,
    and expert_bits are the bits that store one weight of it. has_biases: every projection has a bias, and every head a
    sink."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_head: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    has_biases: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_bits: float = 16.0

    def __post_init__(self) -> None:
        check_fields(self)

    @staticmethod
    def of(c: ModelConfig) -> TargetShape:
        """The shape of a target that this version loads."""
        return TargetShape(
            c.hidden_size, c.intermediate_size, c.num_layers, c.num_heads, c.num_kv_heads, c.head_dim, c.vocab_size,
            c.tied_head, c.qkv_bias, c.qk_norm, c.o_bias, c.mlp_bias,
        )  # fmt: skip

    @property
    def widths(self) -> tuple[int, int]:
        """Width of all query heads together, and of all key heads."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts of all layers, biases included; 0 without experts."""
        H, inner = self.hidden_size, self.intermediate_size
        biases = 2 * inner + H if self.has_biases else 0
        return self.num_layers * self.num_experts * (3 * H * inner + biases)

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        H, (q, kv) = self.hidden_size, self.widths
        layer = 2 * H * (q + kv) + 2 * H
        layer += q + 2 * kv if self.qkv_bias or self.has_biases else 0
        layer += H + self.num_heads if self.has_biases else 0
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += H if self.o_bias else 0
        layer += 2 * self.intermediate_size + H if self.mlp_bias else 0
        if self.num_experts:
            layer += H * self.num_experts + (self.num_experts if self.has_biases else 0)
        else:
            layer += 3 * H * self.intermediate_size
        ends = self.vocab_size * H * (1 if self.tied_head else 2) + H
        return self.num_layers * layer + self.expert_parameters + ends

    @property
    def stored_bytes(self) -> int:
        """Bytes of the published weights: bfloat16, experts in their own format."""
        experts = self.expert_parameters
        return 2 * (self.parameters - experts) + round(experts * self.expert_bits / 8)

    @property
    def layer_products(self) -> int:
        """Multiplications with weights that one token takes in all layers."""
        H, (q, kv) = self.hidden_size, self.widths
        mlps = max(1, self.experts_per_token)
        return self.num_layers * (2 * H * (q + kv) + 3 * H * self.intermediate_size * mlps + H * self.num_experts)


@dataclass(frozen=True)
class DraftShape:
    """An EAGLE-3 head as a run would make it."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_capture: int = 3

    @staticmethod
    def of(target: TargetShape, config: TrainConfig) -> DraftShape:
        """The draft's shape in a run of these settings; sizes that the settings leave open are the target's."""
        return DraftShape(
            target.hidden_size,
            config.intermediate_size or target.intermediate_size,
            config.num_heads or target.num_heads,
            config.num_kv_heads or target.num_kv_heads,
            target.head_dim,
            config.draft_vocab_size or min(DEFAULT_SIZE, target.vocab_size),
            len(config.capture or (0, 0, 0)),
        )

    @property
    def fuse_products(self) -> int:
        """Weights of fc, which every position passes once."""
        return self.num_capture * self.hidden_size**2

    @property
    def layer_products(self) -> int:
        """Weights of the decoder layer, which every row of every pass takes."""
        H, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return 2 * H * (q + 2 * kv) + H * q + 3 * H * self.intermediate_size

    @property
    def head_products(self) -> int:
        """Weights of the output matrix."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters that are trained; the embedding is the target's."""
        return self.fuse_products + self.layer_products + self.head_products + 4 * self.hidden_size

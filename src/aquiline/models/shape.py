"""What a model consists of: blocks, matrices, parameters, and their bytes in every storage.

The one description that is counted from: `aquiline limits`, the roofline of results, training estimates. Reads nothing
and runs nothing: `counting.py` makes shapes of configurations. Sizes in bytes are floats: a step reads an expected
number of experts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Matrix:
    """A linear: n outputs, k inputs."""

    n: int
    k: int
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        """Weights of the matrix, and multiply-adds of one row."""
        return self.n * self.k

    @property
    def num_biases(self) -> int:
        """Parameters of the bias; its additions are not counted as FLOPs."""
        return self.n if self.has_bias else 0


@dataclass(frozen=True)
class Storage:
    """How weights are stored. bits: of a weight; scale_bits: of a scale; group: how many inputs of one output share a
    scale, 0 for all of them."""

    name: str
    bits: int
    scale_bits: int = 0
    group: int = 0

    def num_bytes(self, matrix: Matrix) -> float:
        """Bytes of a matrix with its scales, without its bias."""
        groups = math.ceil(matrix.k / self.group) if self.group else 1
        return (matrix.num_weights * self.bits + matrix.n * groups * self.scale_bits) / 8


STORAGES = {
    storage.name: storage
    for storage in (
        Storage("float32", 32),
        Storage("bfloat16", 16),
        Storage("float16", 16),
        Storage("fp8", 8, 32),
        Storage("int8", 8, 32),
        Storage("int4", 4, 16, 32),
        Storage("mxfp4", 4, 8, 32),
        Storage("q8_0", 8, 16, 32),
        Storage("q4_0", 4, 16, 32),
        Storage("q4_1", 4, 32, 32),
        Storage("q5_0", 5, 16, 32),
        Storage("q5_1", 5, 32, 32),
        Storage("q4_k", 4, 20, 32),
        Storage("q5_k", 5, 20, 32),
        Storage("q6_k", 6, 9, 16),
        Storage("iq4_nl", 4, 16, 32),
    )
}
"""The values of `--dtype`. fp8 and int8: a float32 scale per output; int4: a bfloat16 scale per 32 inputs; mxfp4: an
8-bit exponent per 32 inputs (OCP Microscaling Formats 1.0, section 5); q8_0 and the following: GGUF's packed blocks as
the native library stores them (csrc/formats), where q4_k and q5_k take 0.125 bits more than in the file."""

KV_STORAGES = ("float32", "bfloat16", "float16", "fp8")


@dataclass(frozen=True)
class Precision:
    """The storage of each kind of tensor. plain: that of embedding, norms, biases and routers, never quantised."""

    layers: Storage
    experts: Storage
    head: Storage
    plain: Storage
    kv: Storage

    @property
    def name(self) -> str:
        """The name of the storage that most weights have."""
        return self.experts.name

    def vector_bytes(self, count: float) -> float:
        """Bytes of `count` elements in plain storage."""
        return count * self.plain.bits / 8

    def kv_bytes(self, count: float) -> float:
        """Bytes of `count` elements of keys and values."""
        return count * self.kv.bits / 8


def expected_experts(num_experts: int, per_token: int, rows: float) -> float:
    """Expected number of different experts that `rows` rows use, if each row picks `per_token` experts uniformly and
    independently. Neighbouring tokens of real text share experts, so a real step reads at most about this many."""
    return num_experts * (1 - math.pow(1 - per_token / num_experts, rows))


@dataclass(frozen=True)
class AttentionShape:
    """Attention: fused qkv with `inputs` inputs, and o. window: in positions, 0 for none."""

    hidden_size: int
    inputs: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    window: int = 0

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The linears that every row uses."""
        qkv = Matrix((self.num_heads + 2 * self.num_kv_heads) * self.head_dim, self.inputs, self.qkv_bias)
        return qkv, Matrix(self.hidden_size, self.num_heads * self.head_dim, self.o_bias)

    @property
    def num_vector(self) -> int:
        """Elements of the norms of heads, and of sinks."""
        return 2 * self.head_dim * self.qk_norm + self.num_heads * self.sinks


@dataclass(frozen=True)
class Dense:
    """A gated MLP: fused gate and up, and down."""

    hidden_size: int
    inner: int
    has_bias: bool = False

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The linears that every row uses."""
        return (
            Matrix(2 * self.inner, self.hidden_size, self.has_bias),
            Matrix(self.hidden_size, self.inner, self.has_bias),
        )

    @property
    def width(self) -> int:
        """MLP width that one row computes with."""
        return self.inner


@dataclass(frozen=True)
class MoE:
    """A mixture of experts: a router, `num_experts` gated MLPs of which a row uses some, and MLPs that all rows use.

    shared_gate: the shared MLP is gated by one more output."""

    expert: Dense
    num_experts: int
    experts_per_token: int
    router_bias: bool = False
    shared: Dense | None = None
    shared_gate: bool = False

    @property
    def router(self) -> Matrix:
        """The linear that scores experts; never quantised."""
        return Matrix(self.num_experts, self.expert.hidden_size, self.router_bias)

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The linears that every row uses, the router apart."""
        gate = (Matrix(1, self.expert.hidden_size),) if self.shared_gate else ()
        return gate + (self.shared.matrices if self.shared is not None else ())

    @property
    def width(self) -> int:
        """MLP width that one row computes with."""
        return self.expert.inner * self.experts_per_token + (self.shared.inner if self.shared is not None else 0)


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer: its blocks, and norms of the hidden size."""

    attention: AttentionShape
    mlp: Dense | MoE
    num_norms: int = 2

    @property
    def fixed(self) -> tuple[Matrix, ...]:
        """The linears that every row uses, the router apart."""
        return self.attention.matrices + self.mlp.matrices

    @property
    def num_experts(self) -> int:
        """Experts of the layer; 0 for a dense one."""
        return self.mlp.num_experts if isinstance(self.mlp, MoE) else 0

    @property
    def kv_per_token(self) -> int:
        """Elements of keys and values that one token stores."""
        return 2 * self.attention.num_kv_heads * self.attention.head_dim

    @property
    def num_vector(self) -> int:
        """Elements of norms and sinks."""
        return self.num_norms * self.attention.hidden_size + self.attention.num_vector

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer, all experts included."""
        return self._parameters(self.num_experts)

    @property
    def num_active(self) -> int:
        """Parameters that one row computes with."""
        return self._parameters(self._experts_of_a_row)

    @property
    def multiply_adds(self) -> int:
        """Multiply-adds of all linears for one row."""
        used = [*self.fixed, *self._expert * self._experts_of_a_row, *self._router]
        return sum(m.num_weights for m in used)

    def touched_experts(self, rows: float) -> float:
        """Expected number of experts that a step with `rows` rows reads."""
        return expected_experts(self.num_experts, self._experts_of_a_row, rows) if self.num_experts else 0.0

    def num_bytes(self, precision: Precision, num_experts: float) -> float:
        """Bytes of the layer with num_experts of its experts."""
        vector = self.num_vector + sum(m.num_biases for m in self.fixed)
        vector += sum(m.num_weights + m.num_biases for m in self._router)
        expert = sum(precision.experts.num_bytes(m) + precision.vector_bytes(m.num_biases) for m in self._expert)
        fixed = sum(precision.layers.num_bytes(m) for m in self.fixed)
        return fixed + precision.vector_bytes(vector) + num_experts * expert

    @property
    def _expert(self) -> tuple[Matrix, ...]:
        return self.mlp.expert.matrices if isinstance(self.mlp, MoE) else ()

    @property
    def _router(self) -> tuple[Matrix, ...]:
        return (self.mlp.router,) if isinstance(self.mlp, MoE) else ()

    @property
    def _experts_of_a_row(self) -> int:
        return self.mlp.experts_per_token if isinstance(self.mlp, MoE) else 0

    def _parameters(self, num_experts: int) -> int:
        matrices = [*self.fixed, *self._expert * num_experts, *self._router]
        return self.num_vector + sum(m.num_weights + m.num_biases for m in matrices)


@dataclass(frozen=True)
class BodyShape:
    """What one forward runs, as it is stored: layers, then a head. num_vector: elements of the norms outside the
    layers."""

    hidden_size: int
    layers: tuple[LayerShape, ...]
    head: Matrix
    num_vector: int
    precision: Precision

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values of one token. Every layer keeps every token, even with a window, as the engine's
        pages do."""
        return self.precision.kv_bytes(sum(layer.kv_per_token for layer in self.layers))

    @property
    def layer_bytes(self) -> float:
        """Bytes of all layers with all their experts."""
        return sum(layer.num_bytes(self.precision, layer.num_experts) for layer in self.layers)


@dataclass(frozen=True)
class ModelShape:
    """A target. assumptions: about what its configuration does not say."""

    family: str
    body: BodyShape
    tied_head: bool
    max_positions: int | None
    assumptions: tuple[str, ...] = ()

    @property
    def vocab_size(self) -> int:
        """Rows of the head, and of the embedding."""
        return self.body.head.n

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.num_experts for layer in self.body.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters of the model; a tied head counts once."""
        embeddings = self.vocab_size * self.body.hidden_size * (1 if self.tied_head else 2)
        return embeddings + self.body.num_vector + sum(layer.num_parameters for layer in self.body.layers)

    @property
    def num_active(self) -> int:
        """Parameters that one token computes with, including the head but not the embedding."""
        return self.body.head.num_weights + self.body.num_vector + sum(layer.num_active for layer in self.body.layers)

    @property
    def stored_bytes(self) -> float:
        """Bytes of the whole model. A tied head is stored apart only if its storage differs from the embedding's."""
        precision = self.body.precision
        head = 0.0 if self.tied_head and precision.head == precision.plain else precision.head.num_bytes(self.body.head)
        plain = precision.vector_bytes(self.vocab_size * self.body.hidden_size + self.body.num_vector)
        return head + plain + self.body.layer_bytes


@dataclass(frozen=True)
class DraftShape:
    """An EAGLE-3 head: fc over the captured features, one layer over [embedding; hidden], a head over its vocabulary.

    num_embedding: elements of an embedding of its own; 0 if it shares the target's."""

    body: BodyShape
    fc: Matrix
    num_embedding: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """Parameters of the head; a shared embedding counts as the target's."""
        own = self.num_embedding + self.fc.num_weights + self.body.head.num_weights + self.body.num_vector
        return own + sum(layer.num_parameters for layer in self.body.layers)

    @property
    def stored_bytes(self) -> float:
        """Bytes of the whole head."""
        precision = self.body.precision
        matrices = precision.layers.num_bytes(self.fc) + precision.head.num_bytes(self.body.head)
        plain = precision.vector_bytes(self.num_embedding + self.body.num_vector)
        return matrices + plain + self.body.layer_bytes


def precision_of(dtype: str, kv_dtype: str | None = None, *, is_moe: bool = False) -> Precision:
    """The storage of each kind of tensor under a `--dtype`. float32, bfloat16 and float16 store all tensors.

    fp8 stores the linears of the layers; int8, int4 and packed blocks also the head; mxfp4 the experts, or all linears
    if there are no experts. The other tensors are then bfloat16. "A+B" stores layers as A and the head as B, as GGUF
    files do; beside experts "mxfp4+B" stores all other linears as B. Keys and values have the dtype of those other
    tensors unless kv_dtype says otherwise.

    Raises ValueError for unknown names."""
    dtype, _, head_dtype = dtype.partition("+")
    storage = _storage("dtype", dtype, tuple(STORAGES))
    plain = storage if storage.bits >= 16 else STORAGES["bfloat16"]
    rest = plain if dtype in ("fp8", "mxfp4") else storage
    head = _storage("dtype", head_dtype, tuple(STORAGES)) if head_dtype else rest
    kv = _storage("kv_dtype", kv_dtype or plain.name, KV_STORAGES)
    return Precision(
        layers=head if dtype == "mxfp4" and is_moe else storage, experts=storage, head=head, plain=plain, kv=kv,
    )  # fmt: skip


def _storage(field: str, name: str, known: tuple[str, ...]) -> Storage:
    if name not in known:
        raise ValueError(f"{field}={name!r}: must be one of {', '.join(known)}")
    return STORAGES[name]

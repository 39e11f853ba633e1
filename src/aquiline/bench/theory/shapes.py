"""What a model is made of, for counting: matrices by kind and layer, and what each way of storing them takes.

Reads nothing and runs nothing: `configs.py` makes shapes from configurations, `roofline.py` counts a step's bytes and
FLOPs in them. Sizes in bytes are floats, since a step reads an expected number of experts.
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
        """Also the multiply-adds of one row."""
        return self.n * self.k

    @property
    def num_biases(self) -> int:
        """Additions are not counted as FLOPs, biases as parameters are."""
        return self.n if self.has_bias else 0


@dataclass(frozen=True)
class Storage:
    """Bits of a weight, and of the scale that `group` inputs of one output share; group 0: all of them."""

    name: str
    bits: int
    scale_bits: int = 0
    group: int = 0

    def num_bytes(self, matrix: Matrix) -> float:
        """A matrix, its scales included, its bias not."""
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
    )
}
"""What `--dtype` names. fp8 and int8: a float32 scale per output; int4: a bfloat16 scale per 32 inputs; mxfp4: an 8-bit
exponent per 32 inputs (OCP Microscaling Formats 1.0, section 5)."""

KV_STORAGES = ("float32", "bfloat16", "float16", "fp8")


@dataclass(frozen=True)
class Precision:
    """Which storage each kind of tensor has. `plain`: embedding, norms, biases, routers; never quantised."""

    layers: Storage
    experts: Storage
    head: Storage
    plain: Storage
    kv: Storage

    @property
    def name(self) -> str:
        """What most of the weights are stored as."""
        return self.experts.name

    def vector_bytes(self, count: float) -> float:
        """Elements that are stored plainly."""
        return count * self.plain.bits / 8

    def kv_bytes(self, count: float) -> float:
        """Elements of keys and values."""
        return count * self.kv.bits / 8


def expected_experts(num_experts: int, per_token: int, rows: float) -> float:
    """Different experts that `rows` rows touch if each picks `per_token` of them uniformly and on its own.

    Neighbouring tokens of real text share experts, so a real step reads at most about this many."""
    return num_experts * (1 - math.pow(1 - per_token / num_experts, rows))


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer. `fixed` are the linears every row uses (attention, dense MLP, shared experts); num_vector
    counts norms, sinks and the like; window is in positions, 0 for none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    fixed: tuple[Matrix, ...]
    router: Matrix | None = None
    expert: tuple[Matrix, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0
    num_vector: int = 0
    window: int = 0

    @property
    def kv_per_token(self) -> int:
        """Elements one token stores."""
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """All experts included."""
        return self._parameters(self.num_experts)

    @property
    def num_active(self) -> int:
        """Parameters that one row computes with."""
        return self._parameters(self.experts_per_token)

    @property
    def multiply_adds(self) -> int:
        """Of all linears, for one row."""
        used = [*self.fixed, *self.expert * self.experts_per_token, *filter(None, [self.router])]
        return sum(m.num_weights for m in used)

    def touched_experts(self, rows: float) -> float:
        """Expected number of experts that a step of so many rows reads."""
        return expected_experts(self.num_experts, self.experts_per_token, rows) if self.num_experts else 0.0

    def num_bytes(self, precision: Precision, num_experts: float) -> float:
        """The layer with so many of its experts."""
        vector = self.num_vector + sum(m.num_biases for m in self.fixed)
        vector += sum(m.num_weights + m.num_biases for m in filter(None, [self.router]))
        expert = sum(precision.experts.num_bytes(m) + precision.vector_bytes(m.num_biases) for m in self.expert)
        fixed = sum(precision.layers.num_bytes(m) for m in self.fixed)
        return fixed + precision.vector_bytes(vector) + num_experts * expert

    def _parameters(self, num_experts: int) -> int:
        matrices = [*self.fixed, *self.expert * num_experts, *filter(None, [self.router])]
        return self.num_vector + sum(m.num_weights + m.num_biases for m in matrices)


@dataclass(frozen=True)
class Body:
    """What one forward runs: layers, then a head. num_vector counts the norms outside the layers."""

    hidden_size: int
    layers: tuple[LayerShape, ...]
    head: Matrix
    num_vector: int

    def kv_bytes_per_token(self, precision: Precision) -> float:
        """Every layer keeps every token, as the engine's pages do, windows or not."""
        return precision.kv_bytes(sum(layer.kv_per_token for layer in self.layers))


@dataclass(frozen=True)
class ModelShape:
    """A target. `precision` is its checkpoint's own; `assumptions` what its configuration does not say."""

    family: str
    body: Body
    tied_head: bool
    max_positions: int | None
    precision: Precision
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
        """A tied head counts once."""
        embeddings = self.vocab_size * self.body.hidden_size * (1 if self.tied_head else 2)
        return embeddings + self.body.num_vector + sum(layer.num_parameters for layer in self.body.layers)

    @property
    def num_active(self) -> int:
        """Parameters that one token computes with: the head included, the embedding not."""
        return self.body.head.num_weights + self.body.num_vector + sum(layer.num_active for layer in self.body.layers)

    def stored_bytes(self, precision: Precision) -> float:
        """The whole model. A tied head takes room of its own only if it is stored otherwise than the embedding."""
        head = 0.0 if self.tied_head and precision.head == precision.plain else precision.head.num_bytes(self.body.head)
        plain = precision.vector_bytes(self.vocab_size * self.body.hidden_size + self.body.num_vector)
        return head + plain + sum(layer.num_bytes(precision, layer.num_experts) for layer in self.body.layers)


@dataclass(frozen=True)
class DraftShape:
    """An EAGLE-3 head: fc over the captured features, one layer over [embedding; hidden], a head over its vocabulary.

    num_embedding counts an embedding of its own, 0 where it shares the target's."""

    body: Body
    fc: Matrix
    num_embedding: int = 0
    assumptions: tuple[str, ...] = ()

    @property
    def num_parameters(self) -> int:
        """A shared embedding is the target's."""
        own = self.num_embedding + self.fc.num_weights + self.body.head.num_weights + self.body.num_vector
        return own + sum(layer.num_parameters for layer in self.body.layers)

    def stored_bytes(self, precision: Precision) -> float:
        """The whole head."""
        matrices = precision.layers.num_bytes(self.fc) + precision.head.num_bytes(self.body.head)
        plain = precision.vector_bytes(self.num_embedding + self.body.num_vector)
        return matrices + plain + sum(layer.num_bytes(precision, 0) for layer in self.body.layers)


def precision_of(dtype: str, kv_dtype: str | None = None, *, is_moe: bool = False) -> Precision:
    """Where a `--dtype` puts its bits. float32, bfloat16 and float16 hold everything.

    fp8 holds the layers' linears, int8 and int4 the head's too, mxfp4 the experts' where there are any; the rest is
    bfloat16 then. Keys and values are float32 beside float32 weights, else bfloat16, unless kv_dtype says otherwise.
    Raises ValueError for unknown names."""
    storage = _storage("dtype", dtype, tuple(STORAGES))
    plain = storage if storage.bits >= 16 else STORAGES["bfloat16"]
    kv = _storage("kv_dtype", kv_dtype or plain.name, KV_STORAGES)
    return Precision(
        layers=plain if dtype == "mxfp4" and is_moe else storage, experts=storage,
        head=storage if dtype in ("int8", "int4") else plain, plain=plain, kv=kv,
    )  # fmt: skip


def _storage(field: str, name: str, known: tuple[str, ...]) -> Storage:
    if name not in known:
        raise ValueError(f"{field}={name!r}: must be one of {', '.join(known)}")
    return STORAGES[name]

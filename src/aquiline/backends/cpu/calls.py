"""Models and linears of the native library, one call at a time, on numpy buffers.

Owns packed weights and the structs that describe the caller's buffers; computes nothing itself. A decode step of a
small model takes a millisecond, so a call may cost microseconds only: the structs of rows and caches are kept for the
next call.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int32, c_void_p
from ctypes import pointer as pointer_to
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from aquiline.backends.cpu import native
from aquiline.backends.cpu.buffers import ROWS_ARRAYS, address, describe_kv, describe_rows, pointer
from aquiline.backends.cpu.native import AqAttention, AqExperts, AqKV, AqLayer, AqLinear, AqMlp, AqModel, AqRows
from aquiline.backends.cpu.native_weights import (
    Arena,
    PackedExperts,
    PackedLinear,
    alternating,
    block_code,
    float_code,
    interleave,
    library,
)
from aquiline.blocks import Array, Parts, Weight, in_memory
from aquiline.errors import NativeError
from aquiline.models.model_config import Experts, ModelConfig
from aquiline.models.model_weights import AttentionWeights, DenseWeights, LayerWeights, ModelWeights, MoeWeights
from aquiline.ops.allocator import give_back
from aquiline.ops.quantise import GROUP
from aquiline.types import (
    KEY_GROUP,
    SAMPLING,
    Float32,
    Int32,
    KVGroup,
    Logprobs,
    Rows,
    RowSampling,
    TopK,
)

OTHER_PATH = "the environment variable AQUILINE_ISA=off has torch run it, slower"
"""What is offered for a shape that the library does not have."""


def missing_reason() -> str | None:
    """Why the native path cannot be used; None if it can."""
    return native.missing_reason()


def system() -> dict[str, str | int]:
    """What a result must state: instruction set, threads, and the default arithmetic of a model."""
    loaded = library()
    return {"isa": loaded.isa(), "threads": loaded.num_threads(), "arithmetic": "float32"}


def set_threads(threads: int) -> None:
    """Use this many threads, the calling one included. Results do not depend on it."""
    library().set_threads(threads)


def select_isa(name: str | None) -> None:
    """Use one of config.ISAS; None takes the best this CPU has. Results do not depend on it."""
    library().select_isa(None if name is None else name.encode())


class NativeModel:
    """A decoder whose layers run in one native call. Keeps its own packed copy of the weights.

    arithmetic "bfloat16" multiplies bfloat16 weights, keys and values by factors rounded to bfloat16, which is twice as
    fast on AMD's CPUs and needs AVX512_BF16. "bfloat16_tiles" does the same by AMX and adds up in another order
    (csrc/formats/bfloat16_tiles.h). As in float32, a row's bits do not depend on other rows, threads or chunks; but
    each gives other bits. Sums, norms and sampling are float32 in all.

    arithmetic "int8" rounds what codes are multiplied with to integers (csrc/formats/integer_dot.h): for int8, int4 and
    GGUF's blocks, on every CPU with the same bits. Attention is float32 beside it, and so are linears of floats.

    dtype "int8" or "int4" quantises the linears, the head included; None stores them as given. The embedding and the
    norms are never quantised. arena: where weights are packed; models that share one share an embedding in blocks.

    Not thread-safe: it reuses its argument structs (the library serialises calls anyway)."""

    def __init__(
        self,
        weights: ModelWeights,
        arithmetic: str = "float32",
        dtype: str | None = None,
        arena: Arena | None = None,
    ) -> None:
        config = weights.config
        self._check_widths(config)
        # The two halves of a draft's input are rounded apart, in blocks of GROUP.
        is_odd = weights.is_draft and config.hidden_size % GROUP != 0
        self._arithmetic = "float32" if arithmetic == "int8" and is_odd else arithmetic
        self._dtype = dtype
        self._library = library()
        self._arena = arena or Arena()
        self._kept: list[Any] = []
        # Weak keys: caches live as long as their engines, and a model outlives many engines.
        self._kvs: WeakKeyDictionary[KVGroup, AqKV] = WeakKeyDictionary()
        self._rows: WeakKeyDictionary[Rows, tuple[tuple[Any, ...], AqRows]] = WeakKeyDictionary()
        self.struct = self._describe(weights)
        self.hidden_size, self.is_draft = config.hidden_size, weights.is_draft
        self.num_capture, self.head_size = len(weights.capture), self.struct.head.n
        self._model_ref = byref(self.struct)
        try:
            self.logits(np.empty((0, self.hidden_size), np.float32), np.empty(0, np.int32))  # which checks the model
        except NativeError as error:
            raise ValueError(f"{str(error).partition(': ')[2]}; {OTHER_PATH}") from None

    @staticmethod
    def _check_widths(config: ModelConfig) -> None:
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            if getattr(config, name) % KEY_GROUP != 0:
                raise ValueError(
                    f"{name}={getattr(config, name)}: the native path needs a multiple of {KEY_GROUP}; {OTHER_PATH}"
                )

    def _describe(self, weights: ModelWeights) -> AqModel:
        config, rotary, local = weights.config, weights.rotary, weights.local_rotary
        head = self._pack("head", weights.head)  # the largest comes first, where little is in memory yet
        layers = (AqLayer * len(weights.layers))(*(self._layer(layer, weights) for layer in weights.layers))
        embed_at, embed_dtype, vocab = self._embedding(weights.embed)
        capture = np.asarray(weights.capture, np.int32)
        self._kept += [layers, capture]
        return AqModel(
            hidden=config.hidden_size,
            num_layers=len(weights.layers),
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
            vocab=vocab,
            embed_dtype=embed_dtype,
            is_draft=weights.is_draft,
            norm_before_residual=weights.norm_before_residual,
            num_capture=len(weights.capture),
            eps=config.rms_norm_eps,
            attn_scale=config.attention_scale,
            embed_scale=config.embed_scale,
            rope_scale=rotary.scale,
            local_rope_scale=1.0 if local is None else local.scale,
            inv_freq=self._floats(rotary.inv_freq),
            local_inv_freq=self._floats(None if local is None else local.inv_freq),
            embed=embed_at,
            layers=layers,
            final_norm=self._floats(weights.final_norm),
            head=head,
            capture=capture.ctypes.data,
        )

    def _layer(self, weights: LayerWeights, model: ModelWeights) -> AqLayer:
        names = ("input_norm", "post_norm", "hidden_norm", "attention_out_norm", "mlp_out_norm")
        norms = {name: self._floats(getattr(weights, name)) for name in names}
        layer = AqLayer(self._attention(weights.attention, model), self._mlp(weights.mlp, model.config), **norms)
        give_back()  # what was read to be packed
        return layer

    def _attention(self, weights: AttentionWeights, model: ModelWeights) -> AqAttention:
        qkv, o = self._pack("qkv", weights.qkv, weights.qkv_bias), self._pack("o", weights.o, weights.o_bias)
        floats = {name: self._floats(getattr(weights, name)) for name in ("q_norm", "k_norm", "sinks")}
        return AqAttention(qkv, o, **floats, key_shift=self._floats(model.key_shift(weights)), window=weights.window)

    def _mlp(self, weights: DenseWeights | MoeWeights, config: ModelConfig) -> AqMlp:
        activation = native.ACTIVATIONS.index(config.activation), config.activation_limit
        if isinstance(weights, MoeWeights):
            assert config.experts is not None, "experts that the config does not have"
            gate_up, down, experts = self._experts(weights, config.experts)
            return AqMlp(gate_up, down, pointer_to(experts), *activation)
        bias = weights.gate_up_bias
        interleaved = None if bias is None else alternating(bias[:, None])[:, 0]
        [weight] = weights.gate_up
        gate_up = self._pack("gate_up", (interleave(weight),), interleaved)
        return AqMlp(gate_up, self._pack("down", weights.down, weights.down_bias), None, *activation)

    def _experts(self, weights: MoeWeights, config: Experts) -> tuple[AqLinear, AqLinear, AqExperts]:
        bias = weights.gate_up_bias
        biases = None if bias is None else np.stack([alternating(each[:, None])[:, 0] for each in bias])
        how = self._arithmetic, self._arena, self._dtype
        gate_up = PackedExperts("gate_up", tuple(map(interleave, weights.gate_up)), biases, *how)
        down = PackedExperts("down", weights.down, weights.down_bias, *how)
        [router_weight] = weights.router
        router = PackedLinear("router", router_weight, weights.router_bias, "float32", self._arena)
        sizes = gate_up.num_bytes, down.num_bytes
        experts = AqExperts(router.struct, *sizes, config.count, config.per_token, config.over_all)
        self._kept += [gate_up, down, router, experts]
        return gate_up.struct, down.struct, experts

    def _pack(self, name: str, weight: Parts, bias: Array | None = None) -> AqLinear:
        """A linear; the parts of a fused weight are linked. A tied head in blocks is packed once, embedding and all."""
        known = self._arena.tables.get(weight[0]) if len(weight) == 1 else None
        if known is not None and bias is None:
            return AqLinear(
                known.weight, None, known.n, known.k, block_code(name, weight[0], self._arithmetic, self._dtype)
            )
        rest, end = None, sum(part.shape[0] for part in weight)
        for part in reversed(weight):
            start = end - part.shape[0]
            struct = self._pack_part(name, part, None if bias is None else bias[start:end])
            struct.rest = None if rest is None else addressof(rest)
            rest, end = struct, start
            self._kept.append(struct)
        assert rest is not None, f"{name} has no parts"
        if len(weight) == 1 and weight[0].is_blocks:
            self._arena.tables[weight[0]] = rest
        return rest

    def _pack_part(self, name: str, weight: Weight, bias: Array | None) -> AqLinear:
        packed = PackedLinear(name, weight, bias, self._arithmetic, self._arena, self._dtype)
        self._kept.append(packed)
        return packed.struct

    def _embedding(self, weight: Parts) -> tuple[int, int, int]:
        """Address, code and rows of an embedding: floats as they are read, blocks as a linear has them."""
        [table] = weight
        if not table.is_blocks:
            embed = self._arena.embeddings.get(table)
            if embed is None:
                embed = self._arena.embeddings[table] = table.values
            self._kept.append(embed)
            return embed.ctypes.data, float_code("embed", table.kind), embed.shape[0]
        struct = self._arena.tables.get(table)
        if struct is None:
            packed = PackedLinear("embed", table, None, "float32", self._arena)
            struct = self._arena.tables[table] = packed.struct
        return struct.weight, struct.dtype, struct.n

    def _floats(self, values: Array | None) -> int | None:
        if values is None:
            return None
        own = np.array(values, np.float32, order="C")
        self._kept.append(own)
        return own.ctypes.data

    def forward(
        self, kv: KVGroup, rows: Rows, hidden: Float32, features: Float32 | None = None, g: Float32 | None = None
    ) -> int:
        """Run the first rows.num rows through all layers. Returns how many experts were read, of all layers together.

        Writes keys and values, hidden [max_rows, H] (the residual stream before the final norm) and, if wanted,
        features [max_rows, num_capture * H]. A draft reads g [max_rows, H], which may be `hidden` itself."""
        assert hidden.shape[0] >= rows.num and hidden.shape[1] == self.hidden_size, (hidden.shape, rows.num)
        feature_rows = g_at = None
        if features is not None:
            assert features.shape[0] >= rows.num and features.shape[1] == self.num_capture * self.hidden_size
            begin = address("features", features, np.float32)
            feature_rows = (c_void_p * rows.num)(
                *range(begin, begin + rows.num * features.strides[0], features.strides[0])
            )
        if g is not None:
            assert g.shape[0] >= rows.num and g.shape[1] == self.hidden_size, (g.shape, rows.num)
            g_at = address("g", g, np.float32)
        num_experts = c_int32()
        self._library.forward(
            self._model_ref,
            byref(self._kv_of(kv)),
            byref(self._rows_of(rows)),
            g_at,
            rows.num,
            address("hidden", hidden, np.float32),
            feature_rows,
            byref(num_experts),
        )
        return num_experts.value

    def logits(self, hidden: Float32, row_index: Int32) -> Float32:
        """Logits [n, V] of rows of hidden (the residual stream: the final norm is applied here)."""
        at, index, n = self._selection(hidden, row_index)
        logits = np.empty((n, self.head_size), np.float32)
        self._library.head_logits(self._model_ref, at, index, n, pointer(logits))
        return logits

    def draw(self, hidden: Float32, row_index: Int32, sampling: RowSampling, d2t: Int32 | None = None) -> Int32:
        """Draw a token for each of n rows of hidden; -1 where a logit is NaN or none is finite.

        d2t [Vd], for a draft: the ids drawn are target ids, each with the noise that the target's draw gives that
        id."""
        at, index, n = self._selection(hidden, row_index)
        assert len(sampling) == n, (len(sampling), n)
        tokens = np.empty(n, np.int32)
        how = address("sampling", sampling, SAMPLING)
        self._library.head_draw(self._model_ref, at, index, n, how, self._offsets(d2t), pointer(tokens))
        return tokens

    def top_k(
        self,
        hidden: Float32,
        row_index: Int32,
        k: int,
        sampling: RowSampling | None = None,
        d2t: Int32 | None = None,
    ) -> TopK:
        """The k most probable ids and their log-probabilities for each of n rows of hidden. With `sampling`, ids are
        ranked by logits / temperature + the noise of a draw, and the log-probabilities are those of these sums. d2t as
        in `draw`."""
        at, index, n = self._selection(hidden, row_index)
        result = TopK(np.empty((n, k), np.int32), np.empty((n, k), np.float32))
        assert sampling is None or len(sampling) == n, (sampling, n)
        how = None if sampling is None else address("sampling", sampling, SAMPLING)
        self._library.head_topk(
            self._model_ref, at, index, n, k, how, self._offsets(d2t), pointer(result.ids), pointer(result.logprobs)
        )
        return result

    def logprobs(self, hidden: Float32, row_index: Int32, chosen: Int32, k: int) -> Logprobs:
        """The log-probabilities of token chosen[i] and of the k best ids for each of n rows of hidden."""
        at, index, n = self._selection(hidden, row_index)
        assert len(chosen) == n, (len(chosen), n)
        top = TopK(np.empty((n, k), np.int32), np.empty((n, k), np.float32))
        result = Logprobs(np.empty(n, np.float32), np.empty(n, np.int32), top)
        best = pointer(top.ids), pointer(top.logprobs)
        own = address("chosen", chosen, np.int32), pointer(result.chosen), pointer(result.rank)
        self._library.head_logprobs(self._model_ref, at, index, n, k, *best, *own)
        return result

    def _offsets(self, d2t: Int32 | None) -> int | None:
        assert d2t is None or len(d2t) == self.head_size, (d2t, self.head_size)
        return None if d2t is None else address("d2t", d2t, np.int32)

    def _selection(self, hidden: Float32, row_index: Int32) -> tuple[int, int, int]:
        n = len(row_index)
        assert hidden.shape[1] == self.hidden_size, hidden.shape
        assert n == 0 or max(row_index.tolist()) < hidden.shape[0], (row_index, hidden.shape)
        return address("hidden", hidden, np.float32), address("row_index", row_index, np.int32), n

    def _kv_of(self, kv: KVGroup) -> AqKV:
        struct = self._kvs.get(kv)
        if struct is None:
            struct = self._kvs[kv] = describe_kv(kv)
        return struct

    def _rows_of(self, rows: Rows) -> AqRows:
        arrays = tuple(getattr(rows, name) for name in ROWS_ARRAYS)
        entry = self._rows.get(rows)
        if entry is None or not all(map(is_, arrays, entry[0])):
            entry = self._rows[rows] = (arrays, describe_rows(rows))
        entry[1].num_rows = rows.num
        return entry[1]


class NativeLinear:
    """x [R, K] float32 times a packed weight [N, K], plus a bias. The weight is stored as given (float32, bfloat16,
    float16 or GGUF's blocks) or quantised.

    `arithmetic` and `dtype` are NativeModel's; num_bytes is what one call reads of the weight."""

    def __init__(
        self,
        weight: Array | Weight,
        bias: Array | None = None,
        arithmetic: str = "float32",
        dtype: str | None = None,
    ) -> None:
        weight = weight if isinstance(weight, Weight) else in_memory(weight)
        self._packed = PackedLinear("weight", weight, bias, arithmetic, Arena(), dtype)
        self.num_outputs, self.num_inputs = weight.shape
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Float32) -> Float32:
        """[R, K] to a new array [R, N]."""
        assert x.ndim == 2 and x.shape[1] == self.num_inputs, (x.shape, self.num_inputs)
        y = np.empty((x.shape[0], self.num_outputs), np.float32)
        library().linear(byref(self._packed.struct), address("x", x, np.float32), x.shape[0], pointer(y))
        return y

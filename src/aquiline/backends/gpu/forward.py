"""One model's forward over a fixed number of rows: its buffers, and its launches in order; and what programs share.

The residual stream is float32, what a linear reads is in the weights' dtype, what it writes is float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from aquiline.backends.gpu.mailbox import MailedState
from aquiline.backends.gpu.pages import GpuPages, RowBuffers
from aquiline.backends.gpu.weights import DeviceDraft, DeviceModel, Layer
from aquiline.ops.triton.activation import activation
from aquiline.ops.triton.attention import SpanBuffers, attention
from aquiline.ops.triton.embedding import embedding
from aquiline.ops.triton.experts import ExpertRoutes, expert_down, expert_gate_up, route, sum_experts
from aquiline.ops.triton.head_draw import DrawRows, TileBest, VocabularyHead, best_by_tile
from aquiline.ops.triton.heads import heads
from aquiline.ops.triton.launch import Launch
from aquiline.ops.triton.linear import linear, partials_shape
from aquiline.ops.triton.norm import norm
from aquiline.ops.triton.rows import DeviceRows
from aquiline.ops.triton.tile_table import TileTable
from aquiline.ops.triton.tree_rows import DeviceSlots
from aquiline.spec.drafting import Drafting


@dataclass(eq=False)
class Workspace:
    """Float32 scratch of the launches of one stream, which run one after the other. It grows while launches are built;
    those built before keep what they have. table: how all of them are cut."""

    memory: Tensor
    table: TileTable

    def floats(self, *shapes: tuple[int, ...]) -> list[Tensor]:
        """Room for tensors that are in use together."""
        sizes = [-(-torch.Size(shape).numel() // 16) * 16 for shape in shapes]
        if sum(sizes) > len(self.memory):
            self.memory = torch.empty(sum(sizes), device=self.memory.device)
        parts = torch.split(self.memory[: sum(sizes)], sizes)
        return [part[: torch.Size(shape).numel()].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def linear(
        self, name: str, x: Tensor, weight: Tensor, out: Tensor, slots: Tensor, bias: Tensor | None = None
    ) -> tuple[Launch, ...]:  # fmt: skip
        """A linear of rows, with scratch where it needs some."""
        N, K = weight.shape
        tiles = self.table.linear(N, K, weight.dtype)
        shape = partials_shape(len(x), N, K, tiles)
        partials = self.floats(shape)[0] if shape[0] else None
        return linear(name, x, weight, out, slots, bias=bias, partials=partials, tiles=tiles)

    def best(self, x: Tensor, head: VocabularyHead, rows: DrawRows, count: int) -> tuple[TileBest, Launch]:
        """The `count` best tokens of normed rows by tiles of the vocabulary, and the launch that finds them."""
        V, H = head.weight.shape
        tiles = self.table.head(V, H, head.weight.dtype)
        best = TileBest.new(len(x), len(head.weight), count, x.device, tiles)
        return best, best_by_tile(x, head, rows, best, tiles)


@dataclass(frozen=True, eq=False)
class Mixture:
    """Buffers of a mixture of experts over R rows, of which each chooses P. logits float32 [R, E]; inner [R P, I] in
    the weights' dtype; outputs float32 [R P, H]."""

    routes: ExpertRoutes
    logits: Tensor
    inner: Tensor
    outputs: Tensor


class Forward:
    """A decoder's layers over R rows. hidden float32 [R, H]: the residual stream, after the launches that of the last
    layer; normed [R, H]: its final norm, in the weights' dtype. context: keys that a row may see."""

    def __init__(
        self, model: DeviceModel, pages: GpuPages, at: RowBuffers, context: int, workspace: Workspace, prefix: str
    ) -> None:  # fmt: skip
        self.model, self.pages, self.at, self.workspace, self.prefix = model, pages, at, workspace, prefix
        self.slots, self.context, config = at.rows.slots, context, model.config
        Dh, Hq, Hkv = config.head_dim, config.num_heads, config.num_kv_heads
        self.tiles = workspace.table.attention(Hq, Hkv, Dh, pages.k.dtype)
        self.hidden, self.delta = self._floats(config.hidden_size), self._floats(config.hidden_size)
        self.normed = self._stored(config.hidden_size)
        self.qkv, self.q = self._floats((Hq + 2 * Hkv) * Dh), self._stored(Hq * Dh, pages.k.dtype).view(-1, Hq, Dh)
        self.attended = self._stored(Hq * Dh)
        inner, experts, self.mixture = config.intermediate_size, config.experts, None
        if experts is None:
            self.gate_up, self.inner = self._floats(2 * inner), self._stored(inner)
        else:
            P, H = experts.per_token, config.hidden_size
            routes = ExpertRoutes.new(len(self.slots), experts.count, P, self.slots.device)
            wide = self._stored(P * inner).view(-1, inner), self._floats(P * H).view(-1, H)
            self.mixture = Mixture(routes, self._floats(experts.count), *wide)

    mixture: Mixture | None

    def _floats(self, width: int) -> Tensor:
        return self._stored(width, torch.float32)

    def _stored(self, width: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.zeros(len(self.slots), width, dtype=dtype or self.model.dtype, device=self.slots.device)

    def linear(
        self, name: str, x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None
    ) -> tuple[Launch, ...]:  # fmt: skip
        """A linear of all rows."""
        return self.workspace.linear(f"{self.prefix}{name}", x, weight, out, self.slots, bias)

    def norm(self, name: str, x: Tensor, weight: Tensor | None, out: Tensor | None, **more: Tensor | None) -> Launch:
        """A norm of all rows with this model's epsilon."""
        eps = self.model.config.rms_norm_eps
        return norm(f"{self.prefix}{name}", x, weight, out, self.slots, eps=eps, **more)

    def attend(self, index: int, layer: Layer, x: Tensor) -> list[Launch]:
        """delta = the attention of normed inputs x."""
        config, rows, name = self.model.config, self.at.rows, f"{self.prefix}ATTENTION_FMHA"
        window = config.window(index)
        rotation = self.pages.local if window else self.pages.full
        k, v = self.pages.k[index], self.pages.v[index]
        spans = *self.q.shape[:2], -(-self.context // self.tiles.span)
        sums, stats = self.workspace.floats((*spans, config.head_dim), (*spans, 2))
        return [
            *self.linear("ATTENTION_FMHA.qkv", x, layer["qkv"], self.qkv, layer.get("qkv_bias")),
            heads(
                f"{name}.heads", self.qkv, self.q, k, v, rotation.cos, rotation.sin, rows,
                q_weight=layer.get("q_norm"), k_weight=layer.get("k_norm"), eps=config.rms_norm_eps,
            ),
            *attention(
                f"{name}.spans", self.q, k, v, rows, self.attended, SpanBuffers(sums, stats),
                scale=config.attention_scale, window=window, sinks=layer.get("sinks"), tiles=self.tiles,
            ),
            *self.linear("ATTENTION_FMHA.o", self.attended, layer["o"], self.delta, layer.get("o_bias")),
        ]  # fmt: skip

    def finish_layer(self, index: int, layer: Layer) -> list[Launch]:
        """Add the attention to the stream; delta = the MLP of the sum."""
        own_weight, mixture = layer.get("attention_out_norm"), self.mixture
        summed = self.norm(
            "FFN.norm", self.delta, layer["post_norm"], self.normed, residual=self.hidden, own_weight=own_weight
        )
        return [summed, *(self._dense(layer) if mixture is None else self._mixed(index, layer, mixture))]

    def _mixed(self, index: int, layer: Layer, mixture: Mixture) -> list[Launch]:
        """delta = the mixture of experts of normed inputs."""
        config, name, routes = self.model.config, f"{self.prefix}FFN", mixture.routes
        gate_up, down = self.model.experts[index]
        assert config.experts is not None, "experts without their config"
        return [
            *self.linear("FFN.router", self.normed, layer["router"], mixture.logits, layer.get("router_bias")),
            *route(f"{name}.route", mixture.logits, self.slots, routes, over_all=config.experts.over_all),
            expert_gate_up(
                f"{name}.gate_up", self.normed, gate_up, routes, mixture.inner, kind=config.activation,
                limit=config.activation_limit,
            ),
            expert_down(f"{name}.down", mixture.inner, down, routes, mixture.outputs),
            sum_experts(f"{name}.sum", mixture.outputs, routes, self.slots, self.delta),
        ]  # fmt: skip

    def _dense(self, layer: Layer) -> list[Launch]:
        """delta = the MLP of normed inputs."""
        config, kind = self.model.config, self.model.config.activation
        return [
            *self.linear("FFN.gate_up", self.normed, layer["gate_up"], self.gate_up, layer.get("gate_up_bias")),
            activation(
                f"{self.prefix}FFN.activation", self.gate_up, self.inner, self.slots, kind=kind,
                limit=config.activation_limit,
            ),
            *self.linear("FFN.down", self.inner, layer["down"], self.delta, layer.get("down_bias")),
        ]  # fmt: skip


class TargetForward(Forward):
    """The target over R rows. features [R, C * H]: of the captured layers, in the weights' dtype."""

    def __init__(
        self, model: DeviceModel, pages: GpuPages, at: RowBuffers, context: int, workspace: Workspace
    ) -> None:  # fmt: skip
        super().__init__(model, pages, at, context, workspace, "BASE_")
        self.features = self._stored(len(model.capture) * model.config.hidden_size)

    def launches(self) -> list[Launch]:
        """The whole forward."""
        model, layers = self.model, self.model.layers
        scale = model.config.embed_scale
        name = f"{self.prefix}ATTENTION_FMHA.embed"
        found = [
            embedding(name, self.at.tokens, model.embed, self.hidden, self.slots, scale=scale),
            self.norm("ATTENTION_FMHA.norm", self.hidden, layers[0]["input_norm"], self.normed),
        ]
        for index, layer in enumerate(layers):
            found += [*self.attend(index, layer, self.normed), *self.finish_layer(index, layer)]
            is_last = index + 1 == len(layers)
            weight = model.final_norm if is_last else layers[index + 1]["input_norm"]
            found.append(
                self.norm(
                    "LM_HEAD.norm" if is_last else "ATTENTION_FMHA.norm", self.delta, weight, self.normed,
                    residual=self.hidden, own_weight=layer.get("mlp_out_norm"), feature=self._feature(index),
                )
            )  # fmt: skip
        return found

    def _feature(self, index: int) -> Tensor | None:
        """Where the output of a layer is kept, if it is captured."""
        width, capture = self.model.config.hidden_size, self.model.capture
        return self.features[:, capture.index(index) * width :][:, :width] if index in capture else None


class DraftForward(Forward):
    """The draft's layer over R rows. hidden: the rows' g before the launches, their output after."""

    def __init__(
        self, draft: DeviceDraft, pages: GpuPages, at: RowBuffers, context: int, workspace: Workspace
    ) -> None:  # fmt: skip
        super().__init__(draft.model, pages, at, context, workspace, "EAGLE_DRAFT_")
        self.config, width = draft.config, draft.model.config.hidden_size
        self.embedded, self.both = self._floats(width), self._stored(2 * width)
        self.given = self._floats(width) if draft.config.norm_before_residual else self.hidden

    def launches(self) -> list[Launch]:
        """One pass: given [R, H] is the rows' g, hidden their output."""
        model, [layer] = self.model, self.model.layers
        width = model.config.hidden_size
        name = f"{self.prefix}ATTENTION_FMHA"
        found = [
            embedding(f"{name}.embed", self.at.tokens, model.embed, self.embedded, self.slots),
            self.norm("ATTENTION_FMHA.norm", self.embedded, layer["input_norm"], self.both[:, :width]),
            self.norm("ATTENTION_FMHA.norm", self.given, layer["hidden_norm"], self.both[:, width:]),
        ]
        if self.config.norm_before_residual:
            found.append(self.norm("ATTENTION_FMHA.norm", self.given, layer["hidden_norm"], self.hidden))
        found += [*self.attend(0, layer, self.both), *self.finish_layer(0, layer)]
        return [*found, self.norm("LM_HEAD.norm", self.delta, model.final_norm, self.normed, residual=self.hidden)]


def fuse(
    draft: DeviceDraft, features: Tensor, slots: Tensor, out: Tensor, workspace: Workspace
) -> list[Launch]:  # fmt: skip
    """out float32 [R, H] = the fused features [R, C * Ht] of live rows; features are normed in place where the draft
    norms them."""
    name, found = "EAGLE_DRAFT_FUSE", list[Launch]()
    eps = draft.model.config.rms_norm_eps
    if draft.input_norm is not None:
        found.append(norm(f"{name}.norm", features, draft.input_norm, features, slots, eps=eps))
    if draft.fc_norm is not None:
        parts = features.chunk(len(draft.fc_norm), 1)
        found += [norm(f"{name}.norm", x, w, x, slots, eps=eps) for x, w in zip(parts, draft.fc_norm, strict=True)]
    return [*found, *workspace.linear(f"{name}.fc", features, draft.fc, out, slots)]


@dataclass(frozen=True)
class Bucket:
    """What a program is for. way: how its trees grow, NoDraft for plain decoding; num_decodes: a power of two; context:
    keys that a row may see; keeps_features: whether any of its slots may ever ask for the draft; is_checked: whether a
    kernel checks what the trees' rows see."""

    way: Drafting
    num_decodes: int
    context: int
    keeps_features: bool
    is_checked: bool = False


@dataclass(frozen=True, eq=False)
class DraftParts:
    """A draft model, its pages, and the target's fused features [places, H]."""

    draft: DeviceDraft
    pages: GpuPages
    fused: Tensor


@dataclass(frozen=True, eq=False)
class ProgramParts:
    """What all programs of a backend share: models, pages, the slots' state and scratch."""

    target: DeviceModel
    pages: GpuPages
    state: MailedState
    workspace: Workspace
    parts: DraftParts | None

    @property
    def slots(self) -> DeviceSlots:
        """The slots' state as kernels read it."""
        s = self.state
        return DeviceSlots(s.root, s.draft_end, s.first_draft_key, s.history, s.table, s.sizes.page_size)

    def decodes(self, count: int) -> tuple[Tensor, ...]:
        """Three tensors int32 [count], which the message fills: the slots that decode, those whose trees grow, -1 for
        none, and the nodes of each tree."""
        return tuple(self.state.more.view(3, -1)[:, :count])

    def drawing(self, rows: DeviceRows, ahead: int) -> DrawRows:
        """How rows draw the token that stands `ahead` of their positions."""
        return DrawRows(rows.slots, rows.positions, self.state.temperature, self.state.seed, ahead)

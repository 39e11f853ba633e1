"""What each of several ranks holds of a pair: heads of attentions, outputs of linears, tokens of vocabularies.

In the mode "gather" every output is computed whole on one rank, over all inputs. It is therefore the sum that one rank
alone computes, bit for bit. In the mode "reduce" the linears that end a block, o and down, are split by inputs: each
rank has a part of every sum, and the parts are added up in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from aquiline.blocks import Array, Parts
from aquiline.config import ParallelMode
from aquiline.models.model_config import ModelConfig
from aquiline.models.model_weights import DraftWeights, LayerWeights, ModelWeights

OUTPUTS, ACTIVATIONS = 16, 32
"""Outputs of a linear, and outputs of an MLP's gate, that stay on one rank. Matrix products take outputs in blocks, and
one that a boundary cuts may be added up in another order. Activations are computed in vectors, and those behind the
last whole vector by another formula."""


@dataclass(frozen=True)
class Share:
    """The share of one of `ranks` ranks."""

    rank: int = 0
    ranks: int = 1
    mode: ParallelMode = "gather"

    def part(self, count: int, unit: int = OUTPUTS) -> slice:
        """This rank's of `count` outputs, in units that are not cut; the last rank has what is over."""
        first, end = (count // unit * rank // self.ranks * unit for rank in (self.rank, self.rank + 1))
        return slice(first, count if self.rank == self.ranks - 1 else end)

    def parts(self, count: int, unit: int = OUTPUTS) -> list[slice]:
        """Those of all ranks."""
        return [Share(rank, self.ranks).part(count, unit) for rank in range(self.ranks)]

    def fused(self, *counts: int, unit: int = OUTPUTS) -> list[slice]:
        """This rank's rows of parts that lie one below the other."""
        starts = np.cumsum([0, *counts]).tolist()
        own = [self.part(count, unit) for count in counts]
        return [slice(start + rows.start, start + rows.stop) for start, rows in zip(starts, own, strict=False)]

    def heads(self, config: ModelConfig) -> tuple[slice, slice]:
        """The heads of queries and of keys that this rank computes. Where there are more ranks than key heads, several
        have a copy of one. To keep the bits of one rank, each of them then computes all queries of that key head:
        attention multiplies them together, and products of fewer rows may be added up in another order."""
        num, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
        first = num * self.rank // self.ranks
        keys = slice(first, max(first + 1, num * (self.rank + 1) // self.ranks))
        if self.mode == "reduce":
            return self.part(config.num_heads, 1), keys
        return slice(keys.start * group, keys.stop * group), keys

    def config(self, config: ModelConfig) -> ModelConfig:
        """The geometry of this rank's heads; widths and vocabulary stay those of the model."""
        queries, keys = self.heads(config)
        return replace(config, num_heads=queries.stop - queries.start, num_kv_heads=keys.stop - keys.start)

    def target(self, whole: ModelWeights) -> ModelWeights:
        """This rank's weights of a target; linears are read when they are packed, these rows alone."""
        if self.ranks == 1:
            return whole
        embed = owned(whole.embed, [self.part(whole.config.vocab_size)])
        head = embed if whole.head is whole.embed else owned(whole.head, [self.part(whole.head[0].shape[0])])
        layers = tuple(self._layer(layer, whole.config) for layer in whole.layers)
        return replace(whole, config=self.config(whole.config), embed=embed, head=head, layers=layers)

    def draft(self, whole: DraftWeights, target: ModelWeights, own: ModelWeights) -> DraftWeights:
        """The same of a draft. target, own: the weights of its target, and this rank's of them; what is shared with
        these stays shared."""
        if self.ranks == 1:
            return whole
        model = self.target(whole.model)
        if whole.model.embed is target.embed:
            model = replace(model, embed=own.embed)
        fc = owned(whole.fc, [self.part(whole.fc[0].shape[0])])
        return replace(whole, config=replace(whole.config, model=model.config), model=model, fc=fc)

    def _layer(self, layer: LayerWeights, config: ModelConfig) -> LayerWeights:
        a, m, Dh = layer.attention, layer.mlp, config.head_dim
        queries, keys = self.heads(config)
        below = (0, queries), (config.num_heads, keys), (config.num_heads + config.num_kv_heads, keys)
        heads = [slice((start + own.start) * Dh, (start + own.stop) * Dh) for start, own in below]
        inner = self.fused(config.intermediate_size, config.intermediate_size, unit=ACTIVATIONS)
        o, o_bias = self._last(a.o, a.o_bias, self.part(config.num_heads * Dh, Dh))
        down, down_bias = self._last(m.down, m.down_bias, inner[0])
        attention = replace(
            a, qkv=owned(a.qkv, heads), o=o, qkv_bias=outputs_of(a.qkv_bias, heads), o_bias=o_bias,
            sinks=outputs_of(a.sinks, [queries]),
        )  # fmt: skip
        mlp = replace(
            m, gate_up=owned(m.gate_up, inner), down=down, gate_up_bias=outputs_of(m.gate_up_bias, inner),
            down_bias=down_bias,
        )  # fmt: skip
        return replace(layer, attention=attention, mlp=mlp)

    def _last(self, linear: Parts, bias: Array | None, inputs: slice) -> tuple[Parts, Array | None]:
        """This rank's of the linear that ends a block, or of each expert's, and of its bias, which sums have once."""
        if self.mode == "gather":
            out = [self.part(linear[0].shape[0])]
            return owned(linear, out), outputs_of(bias, out)
        own = bias if bias is None or self.rank == 0 else np.zeros_like(bias)
        return tuple(weight.of_inputs(inputs) for weight in linear), own


def owned(parts: Parts, rows: list[slice]) -> Parts:
    """These rows of a linear, or of each expert's."""
    return tuple(weight.own(rows) for weight in parts)


def outputs_of(bias: Array | None, columns: list[slice]) -> Array | None:
    """These outputs of a bias [n], or of each expert's [E, n]."""
    return None if bias is None else np.concatenate([bias[..., own] for own in columns], axis=-1)


def refuse_ranks(ranks: int, target: ModelWeights, draft: DraftWeights | None) -> None:
    """Raises ValueError if so many ranks cannot share a pair, naming every number that is in the way."""
    problems = list(_problems("target", ranks, target))
    problems += [] if draft is None else _problems("draft", ranks, draft.model)
    if problems:
        raise ValueError(f"tensor_parallel_size={ranks}: {'; '.join(problems)}; use fewer ranks")


def _problems(name: str, ranks: int, model: ModelWeights) -> Iterator[str]:
    config = model.config
    heads, keys = config.num_heads, config.num_kv_heads
    if keys % ranks and (ranks % keys or heads % ranks):
        yield (
            f"the {name} has num_key_value_heads={keys} and num_attention_heads={heads}: ranks must divide the first, "
            "or be a multiple of it and divide the second"
        )
    vocabulary = ("vocab_size", config.vocab_size, OUTPUTS), ("tokens in its head", model.head[0].shape[0], OUTPUTS)
    inner = "intermediate_size", config.intermediate_size, ACTIVATIONS
    for field, size, unit in (("hidden_size", config.hidden_size, OUTPUTS), inner, *vocabulary):
        if size < ranks * unit:
            yield f"the {name} has {field}={size}, and each rank takes at least {unit}"

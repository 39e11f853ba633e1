"""What each of several ranks holds of a pair: heads of attentions, outputs of linears, tokens of vocabularies.

Every output is computed whole on one rank, over all inputs. It is therefore the sum that one rank alone computes, bit
for bit. Splitting by inputs would need sums over ranks, whose order is another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from aquiline.blocks import Array, Parts
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

    def config(self, config: ModelConfig) -> ModelConfig:
        """The geometry of this rank's heads; widths and vocabulary stay those of the model."""
        heads, kv_heads = config.num_heads // self.ranks, config.num_kv_heads // self.ranks
        return replace(config, num_heads=heads, num_kv_heads=kv_heads)

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
        q, kv = config.num_heads * Dh, config.num_kv_heads * Dh
        heads = self.fused(q, kv, kv, unit=Dh)
        inner = self.fused(config.intermediate_size, config.intermediate_size, unit=ACTIVATIONS)
        out = self.fused(config.hidden_size)
        attention = replace(
            a, qkv=owned(a.qkv, heads), o=owned(a.o, out), qkv_bias=outputs_of(a.qkv_bias, heads),
            o_bias=outputs_of(a.o_bias, out), sinks=outputs_of(a.sinks, [self.part(config.num_heads, 1)]),
        )  # fmt: skip
        mlp = replace(
            m, gate_up=owned(m.gate_up, inner), down=owned(m.down, out),
            gate_up_bias=outputs_of(m.gate_up_bias, inner), down_bias=outputs_of(m.down_bias, out),
        )  # fmt: skip
        return replace(layer, attention=attention, mlp=mlp)


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
    if config.num_kv_heads % ranks:
        yield f"the {name} has num_key_value_heads={config.num_kv_heads}, which must be a multiple of the ranks"
    vocabulary = ("vocab_size", config.vocab_size, OUTPUTS), ("tokens in its head", model.head[0].shape[0], OUTPUTS)
    inner = "intermediate_size", config.intermediate_size, ACTIVATIONS
    for field, size, unit in (("hidden_size", config.hidden_size, OUTPUTS), inner, *vocabulary):
        if size < ranks * unit:
            yield f"the {name} has {field}={size}, and each rank takes at least {unit}"

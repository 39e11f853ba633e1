"""The float32 master weights of a run, with their gradients, optimisers and average.

Knows nothing of data, time or files. Everything returned from here is whole on every rank: the head as it would be
served, and the state of a checkpoint. So all ranks must call the methods in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from aquiline.models.eagle import DraftHead
from aquiline.ops.quantise import LINEARS, QUANTISED, quantise
from aquiline.train.batches import Batch
from aquiline.train.distributed import World, gathered, split_like
from aquiline.train.optimizer import Average, build_optimizers
from aquiline.train.teacher import autocast
from aquiline.train.train_config import TrainConfig
from aquiline.train.ttt import Objective, PassRows, TTTResult, ttt_loss


class BatchLoss(nn.Module):
    """The loss of a batch as a module's forward: fsdp keeps the head's weights whole for the time of a forward."""

    def __init__(self, head: DraftHead, objective: Objective) -> None:
        super().__init__()
        self.head, self.objective = head, objective

    def forward(
        self, batch: Batch, planned: Sequence[PassRows], totals: Sequence[float], measure: bool
    ) -> tuple[Tensor, TTTResult]:
        """The differentiable loss as a tensor of its own, which fsdp's hooks need, and the whole result."""
        result = ttt_loss(self.head, batch.tokens, batch.target, self.objective, planned, totals, measure=measure)
        return result.total, result


class Rounding:
    """The linears as `dtype` stores them where the draft serves: rounded from bfloat16, in which drafts are saved. A
    step computes with rounded weights, and its gradients update those that are not rounded, as if rounding were the
    identity: the straight-through estimator of Bengio et al., arXiv 1308.3432.

    scale: what a saved fc is multiplied by (prepare.py). Raises ValueError for a linear that `dtype` cannot hold."""

    def __init__(self, dtype: str, scale: Tensor, named: Mapping[str, nn.Parameter]) -> None:
        self.dtype, self.scale = dtype, scale
        self.linears = {n: p for n, p in named.items() if dtype in QUANTISED and n.rpartition(".")[2] in LINEARS}
        for name, parameter in self.linears.items():
            self.of(name, parameter.data)

    def of(self, name: str, weight: Tensor) -> Tensor:
        """One of the linears, rounded."""
        if name != "fc":
            return quantise(name, weight.bfloat16(), self.dtype).dequantised()
        return quantise(name, (weight * self.scale).bfloat16(), self.dtype).dequantised() / self.scale

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the linears have their rounded values."""
        whole = {name: parameter.data for name, parameter in self.linears.items()}
        try:
            for name, parameter in self.linears.items():
                parameter.data = self.of(name, parameter.data)
            yield
        finally:
            for name, parameter in self.linears.items():
                parameter.data = whole[name]


class Weights:
    """A head in training. With fsdp `head` is split over the ranks and must not be used directly any more."""

    def __init__(
        self, head: DraftHead, objective: Objective, config: TrainConfig, lr: float, scale: Tensor, world: World
    ) -> None:
        if world.parallel == "fsdp":
            if config.optimizer == "muon":
                raise ValueError("optimizer='muon': needs whole matrices; take adamw, or parallel='ddp'")
            if config.draft_dtype in QUANTISED:
                raise ValueError(f"draft_dtype={config.draft_dtype!r}: needs whole matrices; take parallel='ddp'")
        self.head, self.world = head, world
        self.loss = BatchLoss(head, objective)
        world.shard(self.loss, {head.embed})
        self.named = {n: p for n, p in head.named_parameters() if p.requires_grad}
        self.trained = list(self.named.values())
        self.rounding = Rounding(config.draft_dtype, scale, self.named)
        self.optimizers = build_optimizers(head, config.optimizer, lr, config.weight_decay)
        self.average = Average(self.trained, config.ema) if config.ema else None

    def backward(self, batch: Batch, planned: Sequence[PassRows], totals: Sequence[float], measure: bool) -> TTTResult:
        """Add the gradients of one part of a batch. totals: per pass, the weight of the rows of all parts and ranks."""
        with self.rounding.applied():
            with autocast(self.world.device):
                total, result = self.loss(batch, planned, totals, measure)
            total.backward()
        assert isinstance(result, TTTResult)
        return result

    def clip(self, limit: float) -> float:
        """Sum the gradients over the ranks and clip their common norm to `limit`. Returns the norm before clipping."""
        self.world.reduce(self.trained)
        return float(gathered(nn.utils.clip_grad_norm_(self.trained, limit)))

    def update(self) -> None:
        """One step of the optimisers."""
        for optimizer in self.optimizers:
            optimizer.step()
        if self.average is not None:
            self.average.update()

    def clear(self) -> None:
        """Set the gradients to zero."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)

    def served(self) -> DraftHead:
        """The head as it would be saved, with averaged weights if an average is kept. Shares memory with the weights in
        training."""
        weights = self.trained if self.average is None else self.average.weights
        state = {name: gathered(w.detach()) for name, w in zip(self.named, weights, strict=True)}
        with torch.no_grad():
            served = DraftHead(self.head.config)
        state |= {"embed": self.head.embed.detach(), "d2t": self.head.d2t}
        served.load_state_dict(state, assign=True)
        return served.requires_grad_(False).to(self.world.device)

    def as_stored(self, served: DraftHead) -> DraftHead:
        """That head with its linears rounded as they will be stored; itself if they are not."""
        if not self.rounding.linears:
            return served
        state = dict(served.named_parameters()) | {"d2t": served.d2t}
        state |= {name: self.rounding.of(name, state[name]) for name in self.rounding.linears}
        with torch.no_grad():
            stored = DraftHead(served.config)
        stored.load_state_dict(state, assign=True)
        return stored.requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """The state that `restore` takes: whole tensors on the CPU."""

        def kept(tensor: Tensor) -> Tensor:
            return gathered(tensor.detach()).cpu()

        return {
            "head": {name: kept(p) for name, p in self.named.items()},
            "average": None if self.average is None else [kept(w) for w in self.average.weights],
            "average_updates": 0 if self.average is None else self.average.num_updates,
            "optimizers": [tree_map_only(Tensor, kept, o.state_dict()) for o in self.optimizers],
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Take the weights, average and optimiser state of an earlier run. Learning rates stay this run's."""
        assert set(state["head"]) == set(self.named), set(state["head"]) ^ set(self.named)
        for name, parameter in self.named.items():
            parameter.copy_(split_like(state["head"][name], parameter))
        if self.average is not None:
            for weight, kept in zip(self.average.weights, state["average"], strict=True):
                weight.copy_(split_like(kept, weight))
            self.average.num_updates = state["average_updates"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            _load(optimizer, saved)


def _load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    peaks = [group["peak"] for group in optimizer.param_groups]
    state = {
        index: {
            name: split_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["peak"] = peak

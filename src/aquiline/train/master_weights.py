"""The float32 master weights of a run with their gradients, their average, and the rule that updates them: AdamW
throughout, or Muon for the matrices inside, at one schedule of learning rates.

Knows nothing of data, time or files. Everything returned from here is whole on every rank: the head as it would be
served, and the state of a checkpoint. So all ranks must call the methods in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from aquiline.backends.torch.decoder import Decoder
from aquiline.backends.torch.eagle import DraftHead
from aquiline.backends.torch.rounding import rounded
from aquiline.models.model_config import DraftConfig
from aquiline.ops.quantise import LINEARS, QUANTISED
from aquiline.train.batches import Batch
from aquiline.train.distributed import World, gathered, local, split_like
from aquiline.train.teacher import autocast
from aquiline.train.train_config import TrainConfig
from aquiline.train.ttt import Objective, PassRows, TTTResult, ttt_loss

BETAS = (0.9, 0.95)
WARMUP_STEPS = 50
"""Steps of the warm-up at least: the first updates of AdamW are as large as the rate, whatever the gradient. At the
full rate a dozen of them undo a draft that was fitted or trained."""
WIDE_LOGITS = 8.0
"""Size of a target's logits above which the default rate falls: 2 to 6 are usual, Gemma 3 has 55."""


@torch.no_grad()
def default_lr(target: Decoder) -> float:
    """AdamW's peak learning rate for a target's draft: 6e-4 at hidden size 576, falling towards the public recipes'
    1e-4 at 4096, and less where logits are large, because a step of the optimizer moves these further.

    Measured at 576: from a fitted start, rates of 3e-4 to 8e-4 give the same; higher rates undo the fit. For Gemma 3
    270M the loss of the 60th batch is 20.7 at 5e-4 and 13.8 at 5e-5."""
    some = target.head[:: 1 + len(target.head) // 8192].float()
    size = float((some * target.final_norm.float()).square().sum(-1).mean().sqrt())
    return min(1e-3, 0.35 / target.config.hidden_size) * min(1.0, WIDE_LOGITS / size)


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum: a matrix is updated by the semi-orthogonal matrix nearest to its momentum. Source: K.
    Jordan, Muon.

    Computes in float32, unlike torch.optim.Muon, whose bfloat16 products are emulated on many CPUs."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, momentum: float = 0.95, decay: float = 0.0) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update; gradients must be there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                buffer = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalise(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.mul_(1 - group["lr"] * group["decay"])
                parameter.add_(update, alpha=-group["lr"] * max(1.0, update.shape[0] / update.shape[1]) ** 0.5)


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz towards the nearest semi-orthogonal matrix; singular values end within 0.7 to 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp_min(1e-7)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


class Average:
    """An exponential average of weights over training steps; it often serves better than the last weights."""

    def __init__(self, parameters: list[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay, self.num_updates = parameters, decay, 0
        self.weights = [p.detach().clone() for p in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; faster at first, while it is the average of few steps."""
        self.num_updates += 1
        decay = min(self.decay, (1 + self.num_updates) / (10 + self.num_updates))
        torch._foreach_lerp_([local(w) for w in self.weights], [local(p.detach()) for p in self.parameters], 1 - decay)


def build_optimizers(head: DraftHead, name: str, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Optimisers of all parameters that require a gradient. With name "muon", AdamW runs at `lr` and Muon at 6 lr."""
    trained = {n: p for n, p in head.named_parameters() if p.requires_grad}
    inner = [p for n, p in trained.items() if p.ndim == 2 and n not in ("head", "fc_norm")] if name == "muon" else []
    chosen = {id(p) for p in inner}
    rest = [p for p in trained.values() if id(p) not in chosen]
    decayed, plain = [p for p in rest if p.ndim == 2], [p for p in rest if p.ndim != 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=BETAS, fused=True)
    optimizers: list[torch.optim.Optimizer] = [adamw]
    if inner:
        optimizers.append(Muon(inner, 6 * lr, decay=weight_decay))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], progress: float, warmup: float, step: int) -> float:
    """Warm up linearly over the share `warmup` of the run, then a cosine to 2 % of the peak; step number `step`, from
    0, has no more than its share of WARMUP_STEPS. So a run of a few steps stays far below the peak. Returns the
    factor."""
    done = min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
    factor = max(progress / warmup, 0.01) if progress < warmup else cosine
    factor = min(factor, (step + 1) / WARMUP_STEPS)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    return factor


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
            return rounded(name, weight.bfloat16(), self.dtype)
        return rounded(name, (weight * self.scale).bfloat16(), self.dtype) / self.scale

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
    """A head in training. Where it is split over ranks, `head` must not be used directly any more."""

    def __init__(
        self, head: DraftHead, objective: Objective, config: TrainConfig, lr: float, scale: Tensor, world: World
    ) -> None:
        if world.is_split and config.optimizer == "muon":
            raise ValueError("optimizer='muon': needs whole matrices; take adamw, or parallel='ddp'")
        if world.is_split and config.draft_dtype in QUANTISED:
            raise ValueError(f"draft_dtype={config.draft_dtype!r}: needs whole matrices; take parallel='ddp'")
        self.head, self.world = head, world
        self.loss = BatchLoss(head, objective)
        world.shard(self.loss, {p for p in head.parameters() if not p.requires_grad})
        self.named = {n: p for n, p in head.named_parameters() if p.requires_grad}
        self.trained = list(self.named.values())
        self.rounding = Rounding(config.draft_dtype, scale, dict(head.named_parameters()))
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

    def update(self, is_sound: bool = True) -> None:
        """One step of the optimisers, if the gradients are sound; then the gradients are zero."""
        for optimizer in self.optimizers:
            if is_sound:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        if is_sound and self.average is not None:
            self.average.update()

    def served(self) -> DraftHead:
        """The head as it would be saved, with averaged weights if an average is kept. Shares memory with the weights in
        training."""
        weights = self.trained if self.average is None else self.average.weights
        state = {name: gathered(w.detach()) for name, w in zip(self.named, weights, strict=True)}
        state |= {name: p.detach() for name, p in self.head.named_parameters() if not p.requires_grad}
        state |= {"d2t": self.head.d2t}
        return _frozen(self.head.config, state).to(self.world.device)

    def as_stored(self, served: DraftHead) -> DraftHead:
        """That head with its linears rounded as they will be stored; itself if they are not."""
        if not self.rounding.linears:
            return served
        state = dict(served.named_parameters()) | {"d2t": served.d2t}
        state |= {name: self.rounding.of(name, state[name]) for name in self.rounding.linears}
        return _frozen(served.config, state)

    @torch.no_grad()
    def round(self) -> None:
        """Begin from the trained linears as they will be stored. To be called before the first step.

        What is served changes then only where a weight moves by half a step of its storage, and much less than from
        weights that lie anywhere between two steps."""
        for name, parameter in self.rounding.linears.items():
            if parameter.requires_grad:
                parameter.copy_(self.rounding.of(name, parameter))
        if self.average is not None:
            self.average = Average(self.trained, self.average.decay)

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


def _frozen(config: DraftConfig, state: dict[str, Tensor]) -> DraftHead:
    """A head that shares the memory of `state` and does not train."""
    with torch.no_grad():
        head = DraftHead(config)
    head.load_state_dict(state, assign=True)
    return head.requires_grad_(False)


def _load(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Give an optimiser the saved state of each parameter, as the parameter is split. Its settings stay."""
    groups = optimizer.state_dict()["param_groups"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {
        index: {
            name: split_like(value, parameters[index]) if value.shape == parameters[index].shape else value
            for name, value in values.items()
        }
        for index, values in saved["state"].items()
    }
    optimizer.load_state_dict({"state": state, "param_groups": groups})

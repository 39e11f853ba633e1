"""The update rule: AdamW throughout, or Muon for the matrices inside; one learning-rate schedule for both."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from aquiline.models.eagle import DraftHead
from aquiline.train.distributed import local

BETAS = (0.9, 0.95)
WARMUP_STEPS = 50
"""Steps of the warm-up at least: the first updates of AdamW are as large as the rate, whatever the gradient. At the
full rate a dozen of them undo a draft that was fitted or trained."""


def default_lr(hidden_size: int) -> float:
    """AdamW's peak learning rate by hidden size: 6e-4 at 576, falling towards the public recipes' 1e-4 at 4096.

    Measured at 576: from a fitted start, rates of 3e-4 to 8e-4 give the same; higher rates undo the fit."""
    return min(1e-3, 0.35 / hidden_size)


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
    if progress < warmup:
        factor = max(progress / warmup, 0.01)
    else:
        done = min(1.0, (progress - warmup) / max(1e-9, 1 - warmup))
        factor = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done))
    factor = min(factor, (step + 1) / WARMUP_STEPS)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
    return factor

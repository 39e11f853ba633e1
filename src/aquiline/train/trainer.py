"""The training loop: one step, when to look, what to keep. Everything before it is prepare.py's.

OUT/ holds the best draft by simulated tau, ready to serve; OUT/last/ the newest one with training.pt, which --resume
continues from. With a budget in steps or epochs a resumed run repeats exactly what the unbroken one would have done.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from aquiline.errors import NumericalError
from aquiline.models.formats import save_draft
from aquiline.train.config import TrainConfig
from aquiline.train.evaluate import Judgement
from aquiline.train.losses import LOSSES
from aquiline.train.optimizer import build_optimizers, default_lr, set_rate
from aquiline.train.prepare import STATE, Prepared, prepare
from aquiline.train.report import Reporter, StepReport, judgement_dict
from aquiline.train.target import autocast
from aquiline.train.ttt import num_rows, total_loss, ttt_loss

MAX_BAD_STEPS = 10


@dataclass(eq=False)
class Progress:
    """How far a run is; saved with every checkpoint."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # inside training steps only
    best_score: float = 0.0
    best_step: int = 0


class Trainer:
    """Owns the head, its optimisers and the progress of one run."""

    def __init__(self, config: TrainConfig, reporter: Reporter) -> None:
        self.config, self.reporter = config, reporter
        self.run: Prepared = prepare(config, reporter.say)
        self.head = self.run.head
        lr = config.lr or default_lr(self.head.config.model.hidden_size)
        self.optimizers = build_optimizers(self.head, config.optimizer, lr, config.weight_decay)
        self.trained = [p for p in self.head.parameters() if p.requires_grad]
        self.progress = Progress()
        self.bad_steps = 0
        if self.run.state is not None:
            self._restore(self.run.state)

    def train(self) -> dict[str, Any]:
        """Run to the end of the budget; returns the JSON result."""
        last = self._look(save=self.progress.step > 0)
        began = (self.progress.seconds, self.progress.tokens)
        while self.done() < 1:
            self._step(began)
            if self.progress.step % self.config.eval_every == 0 and self.done() < 1:
                last = self._look(save=True)
        last = self._look(save=True)
        p = self.progress
        rate = (p.tokens - began[1]) / max(1e-9, p.seconds - began[0])
        return {
            "draft": str(self.config.out), "steps": p.step, "tokens": p.tokens, "seconds": p.seconds,
            "tokens_per_s": rate, "best_step": p.best_step, "draft_vocab_size": self.head.config.draft_vocab_size,
            "parameters": sum(x.numel() for x in self.trained), **judgement_dict(last),
        }  # fmt: skip

    def done(self) -> float:
        """Share of the budget used, by whichever of steps, epochs and minutes is furthest; one epoch by default."""
        c, p = self.config, self.progress
        epochs = c.epochs if (c.steps or c.minutes or c.epochs) else 1.0
        shares = [p.step / c.steps if c.steps else 0.0, p.seconds / (60 * c.minutes) if c.minutes else 0.0]
        if epochs:
            shares.append(p.step / max(1, round(epochs * self.run.batches.steps_in_first_epoch)))
        return max(shares)

    def _step(self, began: tuple[float, int]) -> None:
        start, p, c = time.perf_counter(), self.progress, self.config
        rate = set_rate(self.optimizers, self.done(), c.warmup)
        is_logged = (p.step + 1) % c.log_every == 0
        batch = self.run.batches.at(p.step, self.run.device)
        with autocast(self.run.device):
            view = self.run.teacher.view(batch)
            steps = ttt_loss(
                self.head, batch, view, c.ttt_steps, LOSSES[c.loss], late_rows=self._late_rows(), measure=is_logged
            )
            loss = total_loss(steps, c.decay)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.trained, c.clip)
        if self._is_sound(loss.item(), norm.item()):
            for optimizer in self.optimizers:
                optimizer.step()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        p.step += 1
        p.tokens += int((batch.document >= 0).sum())
        p.seconds += time.perf_counter() - start
        if is_logged:
            speed = (p.tokens - began[1]) / max(1e-9, p.seconds - began[0])
            accuracy = tuple(s.accuracy for s in steps)
            lr = rate * self.optimizers[0].param_groups[0]["peak"]
            self.reporter.step(
                StepReport(p.step, min(1.0, self.done()), loss.item(), accuracy, norm.item(), lr, p.tokens, speed)
            )

    def _late_rows(self) -> torch.Tensor | None:
        """The positions that later steps train on, drawn anew for every step of the run."""
        c, rows = self.config, num_rows(self.config.context, self.config.ttt_steps)
        if c.late_share == 1 or c.ttt_steps == 1:
            return None
        generator = torch.Generator().manual_seed(c.seed * 1_000_003 + self.progress.step)
        chosen = torch.randperm(rows, generator=generator)[: max(1, round(c.late_share * rows))]
        return chosen.sort().values.to(self.run.device)

    def _is_sound(self, loss: float, norm: float) -> bool:
        """False skips a step with a NaN or infinity; ten in a row end the run."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.bad_steps = 0
            return True
        self.bad_steps += 1
        self.reporter.say(f"step {self.progress.step}: loss {loss}, gradient norm {norm}: step skipped")
        if self.bad_steps >= MAX_BAD_STEPS:
            raise NumericalError(f"{MAX_BAD_STEPS} steps in a row were not finite: lower --lr, resume from OUT/last")
        return False

    def _look(self, *, save: bool) -> Judgement:
        p = self.progress
        with autocast(self.run.device):
            judgement = self.run.held_out.judge(self.head)
        score = (judgement.tau + judgement.tau_sampled) / 2
        is_best = save and score > p.best_score
        if is_best:
            p.best_score, p.best_step = score, p.step
            self._save_draft(self.config.out)
        if save:
            self._save_draft(self.config.out / "last")
            path = self.config.out / STATE
            temporary = path.with_suffix(".tmp")
            torch.save(self._state(), temporary)
            temporary.replace(path)
        self.reporter.judged(p.step, p.seconds, p.tokens, judgement, is_best)
        return judgement

    def _save_draft(self, directory: Any) -> None:
        """In the target checkpoint's storage, bfloat16; the float32 master stays in training.pt."""
        served = copy.deepcopy(self.head)
        served.fc.data *= self.run.teacher.scale
        save_draft(served.to(torch.bfloat16), directory, target=self.run.target)

    def _state(self) -> dict[str, Any]:
        head = {n: t for n, t in self.head.state_dict().items() if n != "embed"}
        optimizers = [o.state_dict() for o in self.optimizers]
        scale = self.run.teacher.scale
        return {"head": head, "scale": scale, "optimizers": optimizers, "progress": vars(self.progress)}

    def _restore(self, state: dict[str, Any]) -> None:
        missing = self.head.load_state_dict(state["head"], strict=False)
        assert missing.missing_keys == ["embed"] and not missing.unexpected_keys, missing
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(f"optimizer={self.config.optimizer!r}: the run to resume used another one")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = Progress(**state["progress"])


def train(config: TrainConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Train a draft as configured; the JSON result. Writes under config.out only."""
    reporter = Reporter(config.out, resume=config.resume, quiet=quiet)
    try:
        return Trainer(config, reporter).train()
    finally:
        reporter.close()

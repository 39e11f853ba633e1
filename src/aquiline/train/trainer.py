"""The training loop: one step, when to look, what to keep. Everything before it is prepare.py's.

OUT/ holds the best draft by simulated tau, ready to serve; OUT/last/ the newest one with training.pt, which --resume
continues from. With a budget in steps, tokens or epochs a resumed run repeats exactly what the unbroken one would have
done.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aquiline.errors import NumericalError
from aquiline.models.formats import save_draft
from aquiline.train.batches import Batch
from aquiline.train.config import TrainConfig
from aquiline.train.evaluate import HeldOut, Judgement
from aquiline.train.losses import LOSSES
from aquiline.train.optimizer import Average, build_optimizers, default_lr, set_rate
from aquiline.train.prepare import prepare
from aquiline.train.report import Reporter, StepReport, judgement_dict
from aquiline.train.teacher import autocast
from aquiline.train.ttt import Objective, TTTResult, num_rows, plan, ttt_loss

MAX_BAD_STEPS = 10
STATE = Path("last") / "training.pt"


@dataclass(eq=False)
class Progress:
    """How far a run is; saved with every checkpoint. seconds: since the command began, those of earlier runs that this
    one resumes included."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_score: float = 0.0
    best_step: int = 0


class Trainer:
    """Owns the head, its optimisers and the progress of one run."""

    def __init__(self, config: TrainConfig, reporter: Reporter) -> None:
        self.began = time.perf_counter()
        self.config, self.reporter = config, reporter
        state = read_state(config.out) if config.resume else None
        self.run = prepare(config, state, reporter.say)
        self.head = self.run.head
        lr = config.lr or default_lr(self.head.config.model.hidden_size)
        self.optimizers = build_optimizers(self.head, config.optimizer, lr, config.weight_decay)
        self.trained = [p for p in self.head.parameters() if p.requires_grad]
        self.average = Average(self.trained, config.ema) if config.ema else None
        self.objective = Objective(
            LOSSES[config.loss], config.ttt_steps, config.decay, needs_best=not config.loss.startswith("agree")
        )
        self.held_out: HeldOut | None = None
        self.progress, self.earlier = Progress(), 0.0
        self.bad_steps, self.stepping_s, self.stepped_tokens = 0, 0.0, 0
        if state is not None:
            self._restore(state)

    def train(self) -> dict[str, Any]:
        """Run to the end of the budget; returns the JSON result."""
        last = None
        while self.done() < 1:
            self._step()
            if self.progress.step % self.config.eval_every == 0 and self.done() < 1:
                last = self._look()
        if last is None or self.progress.step % self.config.eval_every:
            last = self._look()
        p = self.progress
        return {
            "draft": str(self.config.out), "steps": p.step, "tokens": p.tokens, "seconds": self._seconds(),
            "tokens_per_s": self.stepped_tokens / max(1e-9, self.stepping_s), "best_step": p.best_step,
            "draft_vocab_size": self.head.config.draft_vocab_size,
            "parameters": sum(x.numel() for x in self.trained), **judgement_dict(last),
        }  # fmt: skip

    def done(self) -> float:
        """Share of the budget used, by whichever of steps, tokens, epochs and minutes is furthest; one epoch by
        default."""
        c, p = self.config, self.progress
        epochs = c.epochs if (c.steps or c.tokens or c.minutes or c.epochs) else 1.0
        shares = [0.0]
        for used, budget in ((p.step, c.steps), (p.tokens, c.tokens)):
            shares.append(used / budget if budget else 0.0)
        if c.minutes:
            shares.append(self._seconds() / (60 * c.minutes))
        if epochs:
            shares.append(p.step / max(1, round(epochs * self.run.batches.steps_in_first_epoch)))
        return max(shares)

    def _seconds(self) -> float:
        return self.earlier + time.perf_counter() - self.began

    def _step(self) -> None:
        start, p, c = time.perf_counter(), self.progress, self.config
        rate = set_rate(self.optimizers, self.done(), c.warmup)
        rows = self.run.batches.at(p.step)
        batch = self.run.assembler.packed(self.run.batches.corpus, rows, c.context)
        result = self._backward(batch)
        norm = float(torch.nn.utils.clip_grad_norm_(self.trained, c.clip))
        if self._is_sound(float(result.total.detach()), norm):
            for optimizer in self.optimizers:
                optimizer.step()
            if self.average is not None:
                self.average.update()
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=False)
        p.step += 1
        num = batch.tokens.num_tokens
        p.tokens += num
        self.stepped_tokens += num
        self.stepping_s += time.perf_counter() - start
        if p.step % c.log_every == 0 or p.step == 1:
            lr = rate * self.optimizers[0].param_groups[0]["peak"]
            speed = self.stepped_tokens / self.stepping_s
            total = float(result.total.detach())
            report = StepReport(
                p.step, min(1.0, self.done()), total, result.losses, result.accuracy, norm, lr, p.tokens, speed
            )
            self.reporter.step(report)

    def _backward(self, batch: Batch) -> TTTResult:
        with autocast(self.run.device):
            planned = plan(batch.tokens, batch.target, self.objective, self._late_rows())
            result = ttt_loss(self.head, batch.tokens, batch.target, self.objective, planned)
        result.total.backward()  # type: ignore[no-untyped-call]
        return result

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

    def _look(self) -> Judgement:
        """Judge the draft on held-out text and keep it."""
        p = self.progress
        if self.held_out is None:
            self.held_out = self.run.held_out(self.config)
        judged = self._served()
        with autocast(self.run.device):
            judgement = self.held_out.judge(judged)
        is_best = judgement.score > p.best_score
        p.seconds = self._seconds()
        if is_best:
            p.best_score, p.best_step = judgement.score, p.step
            self._save_draft(judged, self.config.out)
        self._save_draft(judged, self.config.out / "last")
        path = self.config.out / STATE
        temporary = path.with_suffix(".tmp")
        torch.save(self._state(), temporary)
        temporary.replace(path)
        self.reporter.judged(p.step, p.seconds, p.tokens, judgement, is_best)
        return judgement

    def _served(self) -> Any:
        """The head as it would be served: with averaged weights where they are kept."""
        if self.average is None:
            return self.head
        served = copy.deepcopy(self.head)
        self.average.copy_to([p for p in served.parameters() if p.requires_grad])
        return served

    def _save_draft(self, head: Any, directory: Path) -> None:
        """In the target checkpoint's storage, bfloat16; the float32 master stays in training.pt."""
        served = copy.deepcopy(head)
        served.fc.data *= self.run.scale
        save_draft(served.to(torch.bfloat16).cpu(), directory, target=self.run.teacher.decoder)

    def _state(self) -> dict[str, Any]:
        head = {n: t for n, t in self.head.state_dict().items() if n != "embed"}
        return {
            "head": head,
            "average": None if self.average is None else self.average.weights,
            "scale": self.run.scale.cpu(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "progress": vars(self.progress),
        }

    def _restore(self, state: dict[str, Any]) -> None:
        missing = self.head.load_state_dict(state["head"], strict=False)
        assert missing.missing_keys == ["embed"] and not missing.unexpected_keys, missing
        if len(state["optimizers"]) != len(self.optimizers):
            raise ValueError(f"optimizer={self.config.optimizer!r}: the run to resume used another one")
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        if self.average is not None and state["average"] is not None:
            self.average.weights = state["average"]
        self.progress = Progress(**state["progress"])
        self.earlier = self.progress.seconds


def read_state(out: Path) -> dict[str, Any]:
    """What a run in `out` left to continue from. Raises ValueError if it left nothing."""
    path = out / STATE
    if not path.is_file():
        raise ValueError(f"--resume: {path} does not exist; start without --resume")
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return state


def train(config: TrainConfig, *, quiet: bool = False) -> dict[str, Any]:
    """Train a draft as configured; the JSON result. Writes under config.out only."""
    reporter = Reporter(config.out, resume=config.resume, quiet=quiet)
    try:
        return Trainer(config, reporter).train()
    finally:
        reporter.close()

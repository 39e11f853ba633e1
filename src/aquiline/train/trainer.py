"""The training loop: one step, when to judge the draft, what to keep. prepare.py does everything before the first step.

OUT/ holds the best draft by simulated tau, ready to serve: the one before the first step, until a later one is better.
OUT/step-NNNNNNN/ hold the newest drafts with the state that --resume needs (checkpoint.py). With a budget in steps,
tokens or epochs a resumed run repeats exactly what the unbroken run would have done: batches, late rows and held-out
text follow from the seed and the step, everything else is in the checkpoint. A "look" is a judgement of the draft on
held-out text.
"""

from __future__ import annotations

import math
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aquiline.backends.torch.eagle import DraftHead, save_head
from aquiline.errors import NumericalError
from aquiline.train.checkpoint import Checkpoint, Checkpoints, compare_settings
from aquiline.train.distributed import World, alone, join
from aquiline.train.estimate import announce, pace_lines, target_shape
from aquiline.train.losses import LOSSES, TAKES_ALL_ROWS
from aquiline.train.master_weights import Weights, set_rate
from aquiline.train.pass_attention import check_attention
from aquiline.train.prepare import prepare
from aquiline.train.run_figures import StepFigures, combine, mean_of
from aquiline.train.run_report import Reporter, Silent, last_line
from aquiline.train.schedule import Budget, Clock, Pace, RunProgress, StopRequest
from aquiline.train.simulated_tau import DraftJudgement, HeldOut
from aquiline.train.teacher import autocast
from aquiline.train.train_config import TrainConfig
from aquiline.train.ttt import Objective, num_rows, plan

MAX_BAD_STEPS = 10
MEASURED_STEPS = 5
"""How many steps before a line of the log also compare best guesses, which costs 2 % of a step."""
PACE_STEPS = 2
"""Steps of a command after which it says how long the rest will take."""
STOPPING = "aquiline: stopping after this step, with a checkpoint; a second signal ends at once, without one"


class Trainer:
    """One rank of a run: the loop around its weights, its progress and its checkpoints."""

    def __init__(
        self, config: TrainConfig, world: World, start: Checkpoint | None, reporter: Reporter | Silent, clock: Clock
    ) -> None:
        if config.batch_size < world.size:
            raise ValueError(f"batch_size={config.batch_size}: gives {world.size} ranks less than a row each; raise it")
        check_attention(config.attention, world.device)
        self.config, self.world, self.reporter, self.clock = config, world, reporter, clock
        self.checkpoints = Checkpoints(config.out, config.keep)
        self.run = prepare(config, start, world, reporter.say)
        self.objective = Objective(
            LOSSES[config.loss], config.ttt_steps, config.decay, config.loss not in TAKES_ALL_ROWS, config.attention,
            config.replay,
        )  # fmt: skip
        self.weights = Weights(self.run.head, self.objective, config, self.run.settings["lr"], self.run.scale, world)
        self.budget = Budget(config, self.run.batches.steps_in_first_epoch)
        self.held_out: HeldOut | None = None
        self.progress = RunProgress()
        self.pace = Pace()
        self.stop = StopRequest(STOPPING)
        self.unlogged: list[StepFigures] = []
        self.is_new = start is None
        if start is not None:
            self._restore(start)
        self._agree_on_time()

    def train(self) -> dict[str, Any]:
        """Run to the end of the budget, or to the first SIGINT or SIGTERM. Returns the JSON result; only the first
        rank's has judgements."""
        last, looked_at, p = None, -1, self.progress
        if self.is_new:
            last, looked_at = self._look(), p.step
            p.prepared_s = p.seconds
        with self.stop, closing(self.run.assembler.views):
            while self.done() < 1 and not self.is_stopped:
                self._step()
                if self._is_look_due():
                    last, looked_at = self._look(), p.step
                elif self.save_due and self.done() < 1:
                    self._save(self.weights.served())
            is_cut = self.is_stopped and self.done() < 1
            if is_cut:
                folder = self._save(self.weights.served())
                self.reporter.say(f"stopped after step {p.step}: {folder} is whole; go on with --resume")
            elif looked_at != p.step:
                last = self._look()
        self.reporter.say(last_line(self.config.out, p))
        return {
            "draft": str(self.config.out), "steps": p.step, "tokens": p.tokens, "seconds": self.clock.seconds(),
            "tokens_per_s": self.pace.tokens_per_s, "is_stopped": is_cut,
            "best_step": p.best_step, "best_tau": p.best_score, "start_tau": p.start_score or None,
            "draft_vocab_size": self.run.head.config.draft_vocab_size,
            "parameters": sum(x.numel() for x in self.weights.trained), **(last.as_dict() if last else {}),
        }  # fmt: skip

    def done(self) -> float:
        """Share of the budget used; the same on every rank."""
        return self.budget.share(self.progress, self.look_s)

    def _agree_on_time(self) -> None:
        """Take the first rank's clock and every rank's request to stop, so that all ranks judge, save and stop at the
        same step."""
        clock = self.clock
        saved_minutes = (time.perf_counter() - clock.saved) / 60
        mine = (clock.seconds(), clock.look_s, float(saved_minutes >= self.config.save_every_minutes))
        agreed = self.world.sum((*(mine if self.world.is_first else (0.0, 0.0, 0.0)), float(self.stop.is_made)))
        self.progress.seconds, self.look_s = agreed[:2]
        self.save_due, self.is_stopped = map(bool, agreed[2:])

    def _is_look_due(self) -> bool:
        """Whether to look now: at every eval_every-th step but the last. A resumed run with a budget in minutes has one
        more at half time, so that the time of the last look is known."""
        done, c = self.done(), self.config
        at_half_time = c.minutes is not None and self.look_s == 0 and done >= 0.5
        return done < 1 and (self.progress.step % c.eval_every == 0 or at_half_time)

    def _step(self) -> None:
        start, p, c = time.perf_counter(), self.progress, self.config
        rate = set_rate(self.weights.optimizers, self.done(), c.warmup, p.step)
        is_logged = (p.step + 1) % c.log_every == 0 or p.step == 0
        is_measured = is_logged or -(p.step + 1) % c.log_every < MEASURED_STEPS
        figures, norm = self._gradients(measure=is_measured)
        self.unlogged.append(figures)
        self.weights.update(self._is_sound(figures.total, norm))
        p.step += 1
        p.tokens += figures.tokens
        self.pace.add(time.perf_counter() - start, figures.tokens)
        self._agree_on_time()
        self.reporter.advance(min(1.0, self.done()))
        if self.pace.num_steps == PACE_STEPS and self.done() < 1:
            num_left = self.budget.steps_left(p, self.look_s, self.pace)
            for line in pace_lines(self.pace, num_left, p.tokens if self.is_new and c.init is None else None):
                self.reporter.say(line)
        if is_logged:
            lr, done = rate * self.run.settings["lr"], min(1.0, self.done())
            mean, self.unlogged = mean_of(self.unlogged), []
            speed = self.pace.tokens_per_s
            self.reporter.step(p.step, mean, done=done, grad_norm=norm, lr=lr, tokens=p.tokens, tokens_per_s=speed)

    def _gradients(self, *, measure: bool = True) -> tuple[StepFigures, float]:
        """Compute and clip the gradients of one step. The loss is a weighted mean over the counted rows of all batches
        of the step on all ranks. Without `measure` the figures per pass are NaN."""
        c, run, share = self.config, self.run, self.world.share
        rows, late = run.batches.at(self.progress.step), self._late_rows()
        starts = range(0, len(rows), c.batch_size)
        shares = [share(rows[i : i + c.batch_size]) for i in starts]
        parts = [run.assembler.packed(run.batches.corpus, own, c.context) for own in shares]
        planned = [plan(part.tokens, part.target, self.objective, late) for part in parts]
        weights = [float(sum(passes[k].weights.sum() for passes in planned)) for k in range(c.ttt_steps)]
        totals = self.world.sum(weights)
        results = [self.weights.backward(part, of, totals, measure) for part, of in zip(parts, planned, strict=True)]
        norm = self.weights.clip(c.clip)
        return combine(results, sum(part.tokens.num_tokens for part in parts), self.world.sum), norm

    def _late_rows(self) -> torch.Tensor | None:
        """The positions that later passes train on, drawn anew for every step of the run."""
        c, rows = self.config, num_rows(self.config.context, self.config.ttt_steps)
        if c.late_share == 1 or c.ttt_steps == 1:
            return None
        generator = torch.Generator().manual_seed(c.seed * 1_000_003 + self.progress.step)
        chosen = torch.randperm(rows, generator=generator)[: max(1, round(c.late_share * rows))]
        return chosen.sort().values.to(self.world.device)

    def _is_sound(self, loss: float, norm: float) -> bool:
        """Whether loss and gradient norm are finite; otherwise the step is skipped. Raises NumericalError after
        MAX_BAD_STEPS such steps in a row."""
        p = self.progress
        if math.isfinite(loss) and math.isfinite(norm):
            p.bad_steps = 0
            return True
        p.bad_steps += 1
        self.reporter.say(f"step {p.step + 1}: loss {loss}, gradient norm {norm}: step skipped")
        if p.bad_steps >= MAX_BAD_STEPS:
            raise NumericalError(
                f"{MAX_BAD_STEPS} steps in a row were not finite: lower --lr, or start from a draft with --init"
            )
        return False

    def _look(self) -> DraftJudgement | None:
        """Judge the draft on held-out text and write a checkpoint. Returns None on ranks other than the first."""
        p, judgement = self.progress, None
        if self.world.is_first and self.held_out is None:
            self.reporter.stage("the target continues held-out prompts, to judge drafts by")
            self.held_out = self.run.held_out(self.config)
        began, served = self.clock.seconds(), self.weights.served()
        if self.world.is_first:
            assert self.held_out is not None
            with autocast(self.world.device):
                judgement = self.held_out.judge(self.weights.as_stored(served))
            if judgement.score > p.best_score:
                p.best_score, p.best_step = judgement.score, p.step
            if p.step == 0:
                p.start_score = judgement.score
        self.world.sum([0.0])  # here the others wait for the first rank: all ranks' group has the patience
        folder = self._save(served)
        if judgement is not None:
            if p.best_step == p.step:
                self.checkpoints.publish(folder)
            self.reporter.judged(p.step, self.clock.seconds(), p.tokens, judgement, p.best_step)
        self.clock.look_s = max(self.clock.look_s, self.clock.seconds() - began)
        self._agree_on_time()
        return judgement

    def _save(self, served: DraftHead) -> Path:
        """Write a checkpoint: the draft in bfloat16, the master weights in float32. Must be called on every rank."""
        p = self.progress
        p.seconds = self.clock.seconds()
        state = self.weights.state()
        state |= {"scale": self.run.scale.cpu(), "progress": vars(p).copy(), "settings": self.run.settings}
        if not self.world.is_first:
            return self.config.out
        folder = self.checkpoints.save(p.step, partial(self.write_draft, served), state)
        self.clock.saved = time.perf_counter()
        return folder

    def write_draft(self, head: DraftHead, folder: Path) -> None:
        """Write a head of the shape of this run's as a draft that can be served. Changes the head."""
        head.fc.data = head.fc.data * self.run.scale
        save_head(head.to(torch.bfloat16).cpu(), folder, target=self.run.teacher.decoder)

    def _restore(self, start: Checkpoint) -> None:
        stored = start.state["settings"]
        notices, is_judged_anew = compare_settings(stored, self.run.settings, self.config.may_differ)
        for notice in notices:
            self.reporter.say(notice)
        self.weights.restore(start.state)
        self.progress = p = RunProgress(**start.state["progress"])
        self.clock.earlier = p.seconds
        if is_judged_anew:
            p.best_score = p.start_score = 0.0
        elif self.world.is_first and p.best_step == p.step:  # the run may have been killed before it was published
            self.checkpoints.publish(start.folder)


def measure(config: TrainConfig) -> tuple[Pace, int]:
    """The pace of some steps of a run, in this process alone, and how many steps the run would have. Writes nothing.
    Raises what `train` raises for settings and data that cannot work."""
    trainer = Trainer(replace(config, features=None), alone(), None, Silent(), Clock())
    for _ in range(PACE_STEPS):
        trainer._step()
    return trainer.pace, trainer.budget.steps_left(RunProgress(), 0.0, trainer.pace)


def train(config: TrainConfig, *, quiet: bool = False) -> dict[str, Any] | None:
    """Train a draft as configured, alone or as one rank under torchrun. Returns the JSON result on the first rank, None
    on the others.

    Writes under config.out and config.features only. Raises ValueError, CheckpointError or NumericalError."""
    clock, checkpoints = Clock(), Checkpoints(config.out, config.keep)
    world = join(config.parallel)
    start = checkpoints.newest() if config.resume else None
    if start is None:
        checkpoints.refuse_to_overwrite()
    reporter: Reporter | Silent = Silent()
    if world.is_first:
        after_step = start.state["progress"]["step"] if start else None
        reporter = Reporter(config.out, after_step=after_step, log=config.log, quiet=quiet)
    try:
        if world.is_first and not quiet:
            announce(config, target_shape(config), reporter.say, world)
            reporter.stage("loading the target, reading the data")
        result = Trainer(config, world, start, reporter, clock).train()
    finally:
        try:
            reporter.close()
        finally:
            world.leave()
    return result if world.is_first else None

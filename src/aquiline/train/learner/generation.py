"""One generation: a short run of training from the weights that serve, a judgement, and the draft in its place.

    DIR/unfinished/attempt.json    which generation this is, from which parent; written last of what training reads
    DIR/unfinished/*.jsonl         the rows of the run
    DIR/unfinished/run/            the run, with the checkpoints that a killed one goes on from (train/trainer.py)
    DIR/unfinished/draft/          the draft that is judged
    DIR/learner.json               the place in DIR/served up to which generations have read

A draft may serve if it commits more tokens a step than its parent on held-out traffic, beyond the interval, and at
least KEPT_OF_OLD of what the shipped draft commits on old prompts (replay.py), greedily and sampled. Where the trained
draft may not, mixtures of its weights with its parent's are judged, and the first that may serve is the generation.
Drafts are compared on the same texts, so the interval is that of paired figures. Of a refused generation only
learning.json stays, with the figures of the trained draft.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from aquiline.backends.torch.eagle import DraftHead
from aquiline.checks import parse_json
from aquiline.engine.learning.store import Generation, LearningStore, Place, Served, write_learning
from aquiline.engine.model import ResolvedPair
from aquiline.errors import CheckpointError
from aquiline.train.checkpoint import DRAFT_FILES, Checkpoint, Checkpoints
from aquiline.train.distributed import alone
from aquiline.train.learner.lesson import KEPT, Lesson, num_answered, write_rows
from aquiline.train.learner.replay import read_replay, write_replay
from aquiline.train.run_report import Silent
from aquiline.train.schedule import Clock
from aquiline.train.simulated_tau import HeldOut, JudgedText
from aquiline.train.start import loaded_head
from aquiline.train.teacher import autocast
from aquiline.train.train_config import STORAGES, TrainConfig
from aquiline.train.trainer import Trainer
from aquiline.types import Float64
from aquiline.writing import placing, write_whole

CONTEXT = 512
"""Tokens of a training row, and of a judged text: of longer ones what is around the beginning of the answer."""
STEPS, ROWS, PASSES, LATE_SHARE = 64, 4, 4, 0.25
"""Of a run: optimizer steps, rows of a step, passes of the draft, and the share of rows that later passes train on."""
AVERAGE = 0.95
"""The decay of averaged weights, without which steps of few rows lose at first what the draft knew."""
REJECTED_WEIGHT = 2.0
"""Weight of tokens that the draft missed in serving."""
KEPT_OF_OLD = 0.995
"""Prompts that judge no draft lose about twice as much as those that do, so this keeps them within 1 %."""
SHARES = (1.0, 0.875, 0.75, 0.5, 0.25)
"""Of the trained draft in what may serve; its parent has the rest. Mixed weights lose less of old skills than of new
ones."""
RESAMPLES = 1000
SAVE_MINUTES = 0.5
"""Minutes between checkpoints: what a kill may cost."""
SERVED, REPLAY, HELD_OUT, ATTEMPT = "served.jsonl", "replay.jsonl", "held_out.jsonl", "attempt.json"
LEARNER = "learner.json"
NUM_KEPT = 8
"""The newest accepted generations whose weights are kept."""


@dataclass(frozen=True)
class Attempt:
    """What attempt.json says: the generation that is made, the one that its training begins from, the served tokens
    that it will have learnt from, the place of the newest request that it has seen, the requests that judge it, and the
    weight of tokens that the draft missed."""

    generation: int
    parent: int
    tokens: int
    last: Place
    held_out: list[Served]
    replay: float

    @classmethod
    def read(cls, path: Path) -> Attempt | None:
        """The attempt of a file; None if there is none."""
        try:
            told = parse_json(path.read_bytes())
        except FileNotFoundError:
            return None
        return cls(**told | {"last": tuple(told["last"]), "held_out": [Served(*each) for each in told["held_out"]]})


class Learner:
    """Makes generations of the pair that a folder belongs to."""

    def __init__(self, store: LearningStore, pair: ResolvedPair) -> None:
        assert pair.draft is not None, "a pair that learns has a draft"
        self.store, self.pair, self.shipped = store, pair, pair.draft
        self.work = store.folder / "unfinished"
        self.run, self.judged = self.work / "run", self.work / "draft"

    def learn(self, lesson: Lesson) -> Generation | None:
        """Make the next generation, or go on with one that was begun. None if it was asked to stop, or if all that was
        served has been forgotten meanwhile.

        Raises OSError or CheckpointError if the disk is full; generations and served requests are then unchanged."""
        write_replay(self.store, self.pair)
        attempt = self._begun() or self._begin(lesson)
        found = next((each for each in self.store.generations() if each.generation == attempt.generation), None)
        if found is None:
            trainer = self._trainer(attempt)
            if trainer.train()["is_stopped"]:
                return None
            found = self._judge(attempt, trainer)
            if self._begun() is None:
                return None
            self._place(found)
        write_whole(self.store.folder / LEARNER, json.dumps({"last": attempt.last}), KEPT)
        shutil.rmtree(self.work)
        return found

    def draft(self, generation: int) -> Path:
        """Where a generation's draft is."""
        return self.store.checkpoint(generation) if generation else self.shipped

    def _begun(self) -> Attempt | None:
        """The attempt that was not finished, if its parent still serves or if its draft is already in its place."""
        attempt = Attempt.read(self.work / ATTEMPT)
        if attempt is None or self.store.checkpoint(attempt.generation).exists():
            return attempt
        return attempt if attempt.parent == self.store.state().serving else None

    def _begin(self, lesson: Lesson) -> Attempt:
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(mode=0o700)
        known, parent = self.store.generations(), self.store.state().serving
        number = 1 + max((each.generation for each in known), default=0)
        tokens = lesson.num_new + max((each.tokens for each in known), default=0)
        old = read_replay(self.store).train
        order = np.random.default_rng(number).permutation(len(old))
        is_beside = np.cumsum([num_answered([old[i]]) for i in order]) <= num_answered(lesson.train)
        write_rows(self.work / SERVED, lesson.train)
        write_rows(self.work / REPLAY, [old[i] for i in order[: 1 + int(is_beside.sum())]])
        write_rows(self.work / HELD_OUT, lesson.held_out)
        weight = REJECTED_WEIGHT if any(each.rejected for each in lesson.train) else 1.0
        attempt = Attempt(number, parent, tokens, lesson.last, lesson.held_out, weight)
        write_whole(self.work / ATTEMPT, json.dumps(asdict(attempt)), KEPT)
        return attempt

    def _trainer(self, attempt: Attempt) -> Trainer:
        """The run of an attempt, from its newest checkpoint or from the parent's draft, of which the shipped one begins
        as it serves. It looks at no text, since what may serve is judged after it."""
        start: Checkpoint | None = None
        with suppress(CheckpointError):
            start = Checkpoints(self.run, 1).newest()
        if start is None:
            shutil.rmtree(self.run, ignore_errors=True)
        trainer = Trainer(self._config(attempt, start is not None), alone(), start, Silent(), Clock())
        trainer.held_out = HeldOut(trainer.run.assembler, [], PASSES)
        if start is None and not attempt.parent:
            trainer.weights.round()
        return trainer

    def _config(self, attempt: Attempt, is_resumed: bool) -> TrainConfig:
        overrides, storage = self.pair.asked.overrides, self.pair.draft_storage
        return TrainConfig(
            target=self.pair.target, data=(self.work / SERVED, self.work / REPLAY), held_out=(self.work / HELD_OUT,),
            out=self.run, init=None if is_resumed else self.draft(attempt.parent), resume=is_resumed, keep_fusion=True,
            capture=overrides.capture, norm_feedback=None if is_resumed else overrides.norm_feedback,
            draft_dtype=storage if storage in STORAGES else "bfloat16", context=CONTEXT, batch_size=ROWS, steps=STEPS,
            ttt_steps=PASSES, late_share=LATE_SHARE, ema=AVERAGE, replay=attempt.replay, eval_every=STEPS, keep=1,
            save_every_minutes=SAVE_MINUTES, seed=attempt.generation,
        )  # fmt: skip

    def _judge(self, attempt: Attempt, trainer: Trainer) -> Generation:
        """The trained draft, or the first mixture that may serve, beside its parent on held-out requests and beside the
        shipped draft on old prompts."""
        new, old = ([*map(_judged, of)] for of in (attempt.held_out, read_replay(self.store).judged))
        held_out, n = HeldOut(trainer.run.assembler, new + old, PASSES), len(new)

        def cycles(path: Path) -> Float64:
            with autocast(trainer.world.device):
                stored = trainer.weights.as_stored(self._head(path, attempt, trainer))
                return np.array(held_out.judge(stored).cycles)

        parent, shipped = cycles(self.draft(attempt.parent)), cycles(self.shipped)
        before, looks = self._head(self.draft(attempt.parent), attempt, trainer), list[Generation]()
        for share in SHARES:
            trainer.write_draft(mixed(before, trainer.weights.served(), share), self.judged)
            after = cycles(self.judged)
            interval, kept = paired_interval(parent[:n], after[:n]), what_is_kept(old, shipped[n:], after[n:])
            looks.append(Generation(
                attempt.generation, attempt.parent, attempt.tokens, _tau(new, parent[:n]), _tau(new, after[:n]),
                interval, *kept, accepted=interval[0] > 1 and kept[1] >= KEPT_OF_OLD * kept[0], share=share,
            ))  # fmt: skip
            if looks[-1].accepted:
                return looks[-1]
        return looks[0]

    def _head(self, path: Path, attempt: Attempt, trainer: Trainer) -> DraftHead:
        """A draft as the run has its own."""
        config = self._config(attempt, is_resumed=False)
        head = loaded_head(path, trainer.run.teacher.decoder, config).requires_grad_(False)
        head.fc.data /= trainer.run.scale
        return head

    def _place(self, found: Generation) -> None:
        """Put the generation in its place by one rename, and drop the weights of old ones."""
        with placing(self.store.checkpoint(found.generation), is_folder=True) as folder:
            for name in DRAFT_FILES if found.accepted else ():
                shutil.copyfile(self.judged / name, folder / name)
            write_learning(folder, found)
        known, serving = self.store.generations(), self.store.state().serving
        needed = {serving, *(each.parent for each in known if each.generation == serving)}
        accepted = [each.generation for each in known if each.accepted]
        for old in set(accepted[:-NUM_KEPT]) - needed:
            for name in DRAFT_FILES:
                (self.store.checkpoint(old) / name).unlink(missing_ok=True)


def paired_interval(before: Float64, after: Float64) -> tuple[float, float]:
    """The 95 % bootstrap interval of tau after over tau before. before, after: the cycles of the same texts [n]."""
    drawn = np.random.default_rng(0).integers(0, len(before), (RESAMPLES, len(before)))
    low, high = np.quantile(before[drawn].sum(1) / after[drawn].sum(1), (0.025, 0.975))
    return float(low), float(high)


def _judged(request: Served) -> JudgedText:
    """A request as a text that a draft is judged by, of CONTEXT tokens at most."""
    start = max(0, request.num_prompt - CONTEXT // 2)
    tokens = np.array(request.tokens[start : start + CONTEXT], np.int32)
    return JudgedText(tokens, request.num_prompt - start, request.temperature)


def mixed(parent: DraftHead, trained: DraftHead, share: float) -> DraftHead:
    """The trained draft, changed: `share` of its weights and the rest of its parent's."""
    for own, other in zip(trained.parameters(), parent.parameters(), strict=True):
        own.data = torch.lerp(other.data, own.data, share)
    return trained


def what_is_kept(old: Sequence[JudgedText], shipped: Float64, after: Float64) -> tuple[float, float]:
    """Tau of the shipped draft and of another on old prompts, greedily or sampled, where the other keeps less. shipped,
    after: the cycles of these texts."""
    is_drawn, taus = [text.temperature > 0 for text in old], []
    for side in set(is_drawn):
        at = [i for i, each in enumerate(is_drawn) if each == side]
        texts = [old[i] for i in at]
        taus.append((_tau(texts, shipped[at]), _tau(texts, after[at])))
    return min(taus, key=lambda pair: pair[1] / pair[0])


def _tau(texts: Sequence[JudgedText], cycles: Float64) -> float:
    """Tokens that simulated cycles commit, those after each answer's first, by the cycle."""
    return sum(len(text.tokens) - text.num_prompt - 1 for text in texts) / float(cycles.sum())

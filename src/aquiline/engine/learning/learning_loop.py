"""The engine's side of a draft that learns: it records what was answered, has the trainer run when there is time, lets
the next generation serve, and takes it back if it serves worse than the one before.

Requests are recorded by the engine's thread. All else is done by a thread of its own, a few times a second: weights are
read and packed there, and the engine goes over to them between two steps (`Engine.step`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from aquiline.backends.choose import is_gpu
from aquiline.config import PairConfig
from aquiline.engine.learning.learn_config import LearnConfig
from aquiline.engine.learning.store import LearningStore, Served, ServedWriter, ServingState
from aquiline.engine.learning.trainer_process import TrainerProcess
from aquiline.engine.llm import LLM
from aquiline.engine.model import ResolvedPair
from aquiline.engine.sequence import Sequence
from aquiline.errors import AquilineError
from aquiline.models.fingerprint import fingerprint
from aquiline.models.model_config import DraftConfig

logger = logging.getLogger(__name__)

TICK_S, FOLLOW_S = 0.1, 1.0
"""Seconds between two looks at whether the engine works, and at what is new in the folder."""

IDLE_S = 3.0
"""Seconds without a step after which the engine counts as waiting for work."""

MOST_REQUESTS, LEAST_REQUESTS = 400, 50
"""Requests of a generation whose acceptance is remembered, the latest; and without which it is not judged. It is judged
each time that so many more have come."""

DEVIATIONS = 2.6
"""Half the width of the interval of a difference, in standard deviations: it holds the truth 99 times of 100."""

TORCH_BYTES, STATE_BYTES, WORD_BYTES = 750e6, 16, 200e3
"""Memory of torch and what it holds back; bytes of a weight that trains: itself, its gradient and two moments in
float32; of the rows of a step, by word of the draft's vocabulary. So two pairs have it, of 3.5 and 1.5 GB."""


@dataclass
class FirstGuesses:
    """How often the first token that the draft model drafted in a step was right, by request. Later tokens would tell
    how long drafts are, which depends on load."""

    requests: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=MOST_REQUESTS))
    num_seen: int = 0

    def add(self, num_guessed: int, num_right: int) -> None:
        """Count a request."""
        if num_guessed:
            self.requests.append((num_guessed, num_right))
            self.num_seen += 1

    def rate(self) -> tuple[float, float]:
        """The share that was right, and its variance: that of a ratio of sums over requests, which are independent of
        each other where the steps of one are not."""
        requests = list(self.requests)  # at once: the engine's thread may add one
        total = sum(guessed for guessed, _ in requests)
        rate = sum(right for _, right in requests) / total
        return rate, sum((right - rate * guessed) ** 2 for guessed, right in requests) / total**2

    def is_behind(self, other: FirstGuesses) -> bool:
        """Whether it is worse than the other by the interval of their difference."""
        if min(len(self.requests), len(other.requests)) < LEAST_REQUESTS:
            return False
        (ours, own), (theirs, others) = self.rate(), other.rate()
        return ours - theirs + DEVIATIONS * math.sqrt(own + others) < 0


class LearningLoop:
    """Learns for one engine. `with LearningLoop(...)`: leaving it kills the trainer and lets the folder go.

    Raises ValueError for a pair that cannot replace its draft and a folder of another pair, OSError for a folder that
    cannot be written or that another process serves with."""

    def __init__(self, llm: LLM, pair: PairConfig, config: LearnConfig) -> None:
        assert config.learn is not None, "without a folder nothing learns"
        self.engine, self.config = llm.engine, config
        self.resolved = ResolvedPair.of(pair)
        if llm.models.draft_config is None or self.resolved.draft is None or not llm.drafting.needs_draft_model:
            raise ValueError(f"learn={str(config.learn)!r}: drafter={llm.drafting.name!r} uses no draft model to train")
        if pair.tensor_parallel_size > 1:
            raise ValueError(f"learn: tensor_parallel_size={pair.tensor_parallel_size}: must be 1 for a draft to learn")
        if is_gpu(pair.device):
            raise ValueError(f"learn: device={pair.device!r}: the draft on a GPU cannot be replaced; use device='cpu'")
        self.store = LearningStore(config.learn)
        self._lock = self.store.lock()
        self.store.claim(
            asdict(replace(pair, target=str(self.resolved.target), draft=str(self.resolved.draft))),
            {"target": fingerprint(self.resolved.target), "draft": fingerprint(self.resolved.draft)},
        )
        self.notice = told(config, llm.models.weight_bytes, llm.models.draft_config)
        self.generation, self._began_s = 0, time.monotonic()
        self._guesses = FirstGuesses()  # of the generation that serves, and of the one before
        self._before: FirstGuesses | None = None
        self._next_judged = LEAST_REQUESTS  # requests of the generation that serves
        self._unwritten: ServingState | None = None  # the disk was full
        self._writer, self._is_full = ServedWriter(self.store, config.learn_bytes), False
        self._trainer = TrainerProcess(config.learn)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="aquiline-learner", daemon=True)

    def __enter__(self) -> LearningLoop:
        self._follow()
        self.engine.on_end = self.record
        self._thread.start()
        return self

    @property
    def summary(self) -> str:
        """Which generation serves, and what it is worth."""
        found = self.store.serving()
        worth = (
            "the draft as it was shipped"
            if found is None
            else (f"simulated tau {found.tau_after:.3f}, {found.tau_before:.3f} of the one before")
        )
        return f"learn: generation {self.generation} serves, {worth}"

    def __exit__(self, *error: object) -> None:
        self.engine.on_end = None
        self._closing.set()
        self._thread.join()
        self._lock.close()

    def record(self, sequence: Sequence) -> None:
        """A request has ended: count its drafts, and store it if it may be. Called between two steps."""
        request = sequence.request
        if request.arrival > self._began_s:
            self._guesses.add(sequence.num_guessed, sequence.num_guessed - sequence.num_missed)
        if not request.learn or request.cache_salt is not None or sequence.error is not None or not sequence.output_ids:
            return
        try:
            self._writer.add(
                Served(sequence.tokens, sequence.num_prompt, sequence.rejected, request.sampling.temperature)
            )
            self._is_full = False
        except OSError as error:
            if not self._is_full:
                logger.warning("learn: requests are not stored until there is room again: %s", error)
            self._is_full = True

    def _run(self) -> None:
        num_forwards, last_s, followed_s, credit_s = 0, time.monotonic(), 0.0, 0.0
        while not self._closing.wait(TICK_S):
            now = time.monotonic()
            if num_forwards != self.engine.meter.num_target_forwards:
                num_forwards, last_s = self.engine.meter.num_target_forwards, now
            is_idle = now - last_s >= IDLE_S
            credit_s = 0.0 if is_idle else min(TICK_S, credit_s + self.config.learn_share * TICK_S)
            may_run = is_idle or credit_s >= TICK_S
            credit_s -= TICK_S if may_run else 0.0
            if self.store.segments() and (ended := self._trainer.pace(may_run)) is not None:
                logger.warning("learn: %s", ended)
            if now - followed_s >= FOLLOW_S:
                followed_s = now
                self._judge()
                self._follow()
        self._trainer.close()

    def _judge(self) -> None:
        """Take the generation that serves back if it is behind the one before."""
        if self._before is None or self._guesses.num_seen < self._next_judged:
            return
        self._next_judged += LEAST_REQUESTS
        if self._guesses.is_behind(self._before):
            parent = next((g.parent for g in self.store.generations() if g.generation == self.generation), 0)
            logger.warning(
                "learn: generation %d is taken back: its first guesses are right %.3f of the time, those before %.3f",
                self.generation, self._guesses.rate()[0], self._before.rate()[0],
            )  # fmt: skip
            self._refuse(self.generation, parent)

    def _follow(self) -> None:
        """Let the generation serve that the folder names, or the next one that was made of it and accepted."""
        if self._unwritten is not None:
            self._write(self._unwritten)
        state = self._state()
        if state.serving != self.generation:
            self._serve(state.serving, state)
        for found in self.store.generations():
            is_next = found.accepted and found.parent == self.generation and found.generation > self.generation
            if is_next and found.generation not in state.rolled_back and self.store.has_weights(found.generation):
                self._serve(found.generation, state)
                return

    def _serve(self, generation: int, state: ServingState) -> None:
        """Have the pair draft with a generation's weights. One that cannot be read never serves."""
        place = self.resolved.draft if generation == 0 else self.store.checkpoint(generation)
        assert place is not None
        try:
            self.engine.models.pair.replace_draft(self.resolved.draft_weights(place))
        except (ValueError, AquilineError, OSError) as error:
            logger.warning("learn: generation %d cannot serve: %s", generation, error)
            self._refuse(generation, self.generation)
            return
        self._before = self._guesses if generation > self.generation else None
        self._guesses, self._next_judged = FirstGuesses(), LEAST_REQUESTS
        self.generation, self._began_s = generation, time.monotonic()
        self._write(replace(state, serving=generation))
        logger.info("learn: generation %d serves", generation)

    def _refuse(self, generation: int, serving: int) -> None:
        """Generation `generation` must not serve again; `serving` does."""
        state = self._state()
        state = ServingState(serving, tuple(sorted({*state.rolled_back, generation})))
        self._write(state)
        if serving != self.generation:
            self._serve(serving, state)

    def _state(self) -> ServingState:
        """What the folder says, or what it is to say once there is room on the disk."""
        return self._unwritten or self.store.state()

    def _write(self, state: ServingState) -> None:
        try:
            self.store.write_state(state)
            self._unwritten = None
        except OSError as error:
            if self._unwritten is None:
                logger.warning("learn: which generation serves is not written until there is room: %s", error)
            self._unwritten = state


@contextmanager
def learning(llm: LLM, pair: PairConfig, config: LearnConfig) -> Iterator[LearningLoop | None]:
    """Learn while the block runs, where settings ask for it. Raises as LearningLoop."""
    if config.learn is None:
        yield None
        return
    with LearningLoop(llm, pair, config) as learner:
        yield learner


def told(config: LearnConfig, weight_bytes: int, draft: DraftConfig) -> str:
    """What a user is told before the first request: what is stored, how to refuse, and what the trainer takes."""
    own, heads = draft.model, draft.model.head_dim * (3 * draft.model.num_heads + 4 * draft.model.num_kv_heads)
    num_weights = own.hidden_size * (3 * own.intermediate_size + draft.draft_vocab_size + heads)
    memory = weight_bytes + TORCH_BYTES + STATE_BYTES * num_weights + WORD_BYTES * draft.draft_vocab_size
    return (
        f"learn: of every answered request the token ids and the places of rejected drafts are stored in "
        f"{config.learn}, readable by its owner alone, {config.learn_bytes / 1e6:.0f} MB at most, the oldest go; "
        f'"learn": false refuses, and requests with a cache_salt are never stored. The trainer is a process of the '
        f"lowest priority with one thread, about {memory / 1e9:.1f} GB of memory"
    )

"""Trouble around a draft that learns, for chaos.py: its trainer is killed, its disk is full, drafts are swapped."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from served import Served

from aquiline.config import PairConfig
from aquiline.engine.learning.store import Generation, LearningStore, ServingState, write_learning
from aquiline.engine.learning.trainer_process import TRAINER
from aquiline.engine.model import ResolvedPair
from aquiline.models.formats import save_draft

WORSE = 1
"""The number of a generation whose guesses are all wrong: a swap to it, and back, is felt at once."""


class Learning:
    """The learning folder of a server in a storm."""

    def __init__(self, folder: Path) -> None:
        self.store = LearningStore(folder)
        self.served: Served | None = None
        self.num_killed = self.num_full = self.num_swapped = 0

    def begin(self) -> tuple[str, ...]:
        """Write a generation that guesses badly, and which is rolled back at first. Returns the server's options."""
        pair = ResolvedPair.of(PairConfig("bundled"))
        assert pair.draft is not None
        draft = pair.draft_weights(pair.draft)
        model = dataclasses.replace(draft.model, final_norm=-draft.model.final_norm)
        save_draft(dataclasses.replace(draft, model=model), self.store.checkpoint(WORSE))
        worse = Generation(WORSE, 0, 0, 1.0, 1.0, (1.0, 1.0), 1.0, 1.0, accepted=True)
        write_learning(self.store.checkpoint(WORSE), worse)
        self.store.write_state(ServingState(0, (WORSE,)))
        return "--learn", str(self.store.folder), "--learn-share", "1"

    async def make_trouble(self, served: Served, rng: random.Random) -> None:
        """Every few seconds something happens, up to the end of the storm; then there is room on the disk again."""
        self.served = served
        try:
            while True:
                await asyncio.sleep(rng.uniform(1, 5))
                await rng.choice([self._kill, self._fill, self._swap, self._swap])(rng)
        finally:
            self._limit(resource.RLIM_INFINITY)

    def wrong(self) -> list[str]:
        """What is wrong with the folder after the storm."""
        found = [f"generation {each.generation} was accepted and has no weights" for each in self.store.generations()
                 if each.accepted and not self.store.has_weights(each.generation)]  # fmt: skip
        folders = [path for path in self.store.generations_folder.iterdir() if path.name.isdigit()]
        if len(folders) != len(self.store.generations()):
            found.append("a generation's folder has no learning.json")
        if not any(self.store.served()):
            found.append("no request was stored")
        private = [self.store.folder, *self.store.segments()]
        open_to_others = [path.name for path in private if path.stat().st_mode & 0o077]
        return found + [f"others may read {name}" for name in open_to_others]

    def figures(self) -> dict[str, Any]:
        """What has happened."""
        made = [each for each in self.store.generations() if each.generation != WORSE]
        return {
            "trainers_killed": self.num_killed, "times_full": self.num_full, "swaps_asked": self.num_swapped,
            "generations": len(made), "accepted": sum(each.accepted for each in made),
            "stored_requests": sum(1 for _ in self.store.served()),
        }  # fmt: skip

    async def _kill(self, rng: random.Random) -> None:
        for process in self._processes():
            with suppress(psutil.Error):
                if TRAINER in process.cmdline():
                    process.kill()
                    self.num_killed += 1

    async def _fill(self, rng: random.Random) -> None:
        self.num_full += 1
        self._limit(rng.choice([0, 10_000, 1_000_000]))
        await asyncio.sleep(rng.uniform(1, 8))
        self._limit(resource.RLIM_INFINITY)

    async def _swap(self, rng: random.Random) -> None:
        """As `aquiline learn DIR --roll-back` has it, and the other way round."""
        state = self.store.state()
        newest = max((each.generation for each in self.store.generations() if each.accepted), default=0)
        self.store.write_state(ServingState(rng.choice([0, WORSE, newest]), state.rolled_back))
        self.num_swapped += 1

    def _limit(self, num_bytes: int) -> None:
        """No file of the engine and the trainer grows beyond so many bytes; what they start inherits it."""
        for process in self._processes():
            with suppress(psutil.Error, OSError):
                hard = process.rlimit(resource.RLIMIT_FSIZE)[1]
                process.rlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))

    def _processes(self) -> list[psutil.Process]:
        """The engine and what it has started."""
        assert self.served is not None
        with suppress(psutil.Error):
            engines = self.served.processes[1:]
            return [each for engine in engines for each in (engine, *engine.children())]
        return []

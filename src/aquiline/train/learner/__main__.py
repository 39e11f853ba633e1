"""`python -m aquiline.train.learner DIR`: make one generation after the other, as traffic comes.

After a generation the process begins anew, since torch and the target would keep their memory while it waits.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from aquiline.checks import parse_json
from aquiline.config import PairConfig
from aquiline.engine.learning.store import LearningStore, Place
from aquiline.errors import AquilineError
from aquiline.train.learner.lesson import Lesson, read_lesson

POLL_S = 5.0
"""Seconds between looks at what was served."""
STOPPED = 143
"""Exit code of a process that was asked to stop."""


def wait_for_lesson(store: LearningStore) -> Lesson:
    """Wait until a generation can be trained, or one that was begun can be finished."""
    after: Place = (0, 0)
    with suppress(OSError):
        after = tuple(parse_json((store.folder / "learner.json").read_bytes())["last"])
    size = -1
    while True:
        grown = sum(segment.stat().st_size for segment in store.segments())
        if grown != size:
            size, lesson = grown, read_lesson(store, after)
            if lesson.is_enough:
                return lesson
        time.sleep(POLL_S)


def main() -> None:
    """Make a generation, then begin anew. Exits with STOPPED where SIGTERM or SIGINT came, and with 1 where something
    is in the way; the last line of stderr says what."""
    store = LearningStore(Path(sys.argv[1]))
    try:
        lesson = wait_for_lesson(store)
        from aquiline.engine.model import ResolvedPair
        from aquiline.train.learner.generation import Learner

        settings = {name: value for name, value in store.pair.items() if name != "identity"}
        settings["capture"] = settings.get("capture") and tuple(settings["capture"])
        if Learner(store, ResolvedPair.of(PairConfig(**settings))).learn(lesson) is None:
            sys.exit(STOPPED)
    except (ValueError, AquilineError, OSError) as error:
        sys.exit(f"aquiline: learning: {error}")
    os.execv(sys.executable, [sys.executable, "-m", "aquiline.train.learner", *sys.argv[1:]])


if __name__ == "__main__":
    main()

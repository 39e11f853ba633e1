"""A folder of a draft that has learnt, without any training: the drafts of its generations are copies of one."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from aquiline.engine.learning.store import (
    Generation,
    LearningStore,
    Served,
    ServedWriter,
    ServingState,
    write_learning,
)

FIRST = Generation(1, 0, 5000, 1.5, 1.8, (1.1, 1.3), 2.0, 1.99, accepted=True)


def write_learnt(folder: Path, draft: Path) -> LearningStore:
    """Generations 1, 2 (refused) and 3, which serves; one served request; replay and an attempt in hand."""
    store = LearningStore(folder)
    store.claim({"target": "smollm2", "draft": None}, {"target": "t"})
    refused = replace(
        FIRST, generation=2, parent=1, tau_before=1.8, tau_after=1.75, interval=(0.9, 1.02), accepted=False
    )
    third = replace(FIRST, generation=3, parent=1, tokens=15000, tau_before=1.8, tau_after=2.0)
    for each in (FIRST, refused, third):
        if each.accepted:
            shutil.copytree(draft, store.checkpoint(each.generation))
        store.checkpoint(each.generation).mkdir(exist_ok=True)
        write_learning(store.checkpoint(each.generation), each)
    store.write_state(ServingState(3))
    ServedWriter(store, 1 << 20).add(Served([1, 2, 3], 1, []))
    for name in ("replay", "unfinished"):
        (folder / name).mkdir()
    (folder / "learner.json").write_text('{"last": [1, 0]}')
    return store

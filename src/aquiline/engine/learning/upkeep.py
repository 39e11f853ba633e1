"""What the owner of a learning folder may do with it: take a draft out, go back to the one of before, forget."""

from __future__ import annotations

import shutil
from pathlib import Path

from aquiline.engine.learning.store import LEARNING, LearningStore, ServingState
from aquiline.writing import check_new, placing


def export_draft(store: LearningStore, generation: int | None, out: Path) -> int:
    """Copy the draft of a generation, by default the one that serves, into a new folder. Returns its number.

    Raises ValueError for a generation without weights, OSError for a place that exists or cannot be written."""
    number = store.state().serving if generation is None else generation
    if not number:
        raise ValueError(
            f"generation=0: is the shipped draft, {store.pair['draft'] or store.pair['target']}; copy that"
        )
    if not store.has_weights(number):
        has = ", ".join(str(each.generation) for each in store.generations() if store.has_weights(each.generation))
        raise ValueError(f"generation={number}: has no weights in {store.folder}; those with weights: {has or 'none'}")
    check_new(out, force=False)
    with placing(out, is_folder=True) as folder:
        for file in store.checkpoint(number).iterdir():
            if file.name != LEARNING:
                shutil.copyfile(file, folder / file.name)
    return number


def roll_back_draft(store: LearningStore) -> int:
    """Let the parent of the serving generation serve, and never again the one that serves now. Returns the parent.

    Raises ValueError where the shipped draft serves, or where the parent's weights are gone."""
    state = store.state()
    found = next((each for each in store.generations() if each.generation == state.serving), None)
    if found is None:
        raise ValueError(f"{store.folder}: the shipped draft serves; there is none before it")
    parent = found.parent
    if parent and not store.has_weights(parent):
        raise ValueError(
            f"{store.folder}: the weights of generation {parent} are gone; --forget everything starts anew"
        )
    store.write_state(ServingState(parent, (*state.rolled_back, state.serving)))
    return parent


def forget_learnt(store: LearningStore, *, is_everything: bool) -> None:
    """Delete what was served, with what the learner had in hand of it. is_everything: the generations too; the shipped
    draft then serves."""
    if is_everything:
        shutil.rmtree(store.generations_folder)  # first: a server must find no generation to go back to
        store.generations_folder.mkdir(mode=0o700)
        store.write_state(ServingState())
    for name in ("unfinished", "learner.json"):
        place = store.folder / name
        shutil.rmtree(place, ignore_errors=True) if place.is_dir() else place.unlink(missing_ok=True)
    for segment in store.segments():
        segment.unlink(missing_ok=True)

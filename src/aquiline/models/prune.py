"""A draft head with a smaller vocabulary: rows of its head and its map between vocabularies, the rest byte by byte.

Source: FR-Spec, arXiv 2502.14856.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from aquiline.errors import CheckpointError
from aquiline.models.draft_config import NO_OVERRIDES
from aquiline.models.draft_vocabulary import choose_vocabulary
from aquiline.models.files import Tensors, read_json, refuse, resolve
from aquiline.models.formats import (
    CONFIG,
    HEAD,
    MAP,
    MASK,
    DraftFiles,
    check_destination,
    head_rows,
    open_draft,
    vocabulary_mask,
    write_files,
)
from aquiline.models.known_pairs import draft_of
from aquiline.models.load import read_model_config
from aquiline.types import Int64
from aquiline.writing import placing


@dataclass(frozen=True, eq=False)
class Pruned:
    """A vocabulary chosen out of a draft's: rows of its head, ascending, and their target ids."""

    rows: Int64
    ids: Int64


def draft_ids(draft: str | Path, target: str | Path) -> Int64:
    """The target ids [Vd] that a draft names. Raises CheckpointError listing everything that does not fit, and for a
    GGUF file, which is not pruned."""
    return head_rows(_opened(draft, target)[0].d2t)


def _opened(draft: str | Path, target: str | Path) -> tuple[DraftFiles, Tensors]:
    found = open_draft(resolve(draft_of(draft)), read_model_config(target), NO_OVERRIDES)
    refuse(found.place, found.problems)
    if not isinstance(found.tensors, Tensors):
        raise CheckpointError(f"{found.place}: a GGUF file is not pruned; convert it to another format first")
    return found, found.tensors


def choose_rows(ids: Int64, weights: Int64, special: Sequence[int], keep: int) -> Pruned:
    """The `keep` tokens of a draft's vocabulary `ids` with the greatest weights [V], every special token of it among
    them.

    Raises ValueError where `keep` cannot hold the special tokens, or is not below the vocabulary."""
    places = tuple(np.flatnonzero(np.isin(ids, list(special))).tolist())
    if not len(places) < keep < len(ids):
        raise ValueError(
            f"keep={keep}: must exceed the {len(places)} special tokens of the draft's vocabulary, and be below its "
            f"{len(ids)} tokens"
        )
    rows = choose_vocabulary(weights[ids], places, keep).ids
    return Pruned(rows, ids[rows])


def write_pruned(draft: str | Path, target: str | Path, chosen: Pruned, destination: Path, force: bool) -> None:
    """Write a draft with that vocabulary alone, in the draft's own format. Raises CheckpointError for a draft that does
    not fit its target or is a GGUF file, OSError for a destination that exists."""
    check_destination(destination, force)
    model, (found, read) = read_model_config(target), _opened(draft, target)
    tensors = {name: read.get(name) for name in read.names}
    if HEAD in tensors:
        tensors[HEAD] = tensors[HEAD][chosen.rows]
    tensors[MAP] = chosen.ids - np.arange(len(chosen.ids))
    if found.reading.format.has_t2d:
        tensors[MASK] = vocabulary_mask(tensors[MAP], model.vocab_size)
    config = read_json(found.place / CONFIG) | {"draft_vocab_size": len(chosen.ids)}
    with placing(destination, is_folder=True) as part:
        write_files(part, tensors, json.dumps(config, indent=2) + "\n", read.metadata)
        again = open_draft(part, model, NO_OVERRIDES)
        refuse(destination, again.problems)

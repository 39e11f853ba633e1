"""Packing is only a matter of speed: a row of several documents has the loss of its documents alone."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch

from aquiline.train.batches import cut, gather, pack
from aquiline.train.documents import Document, build_corpus
from aquiline.train.losses import LOSSES
from aquiline.train.ttt import Objective, plan, ttt_loss

STEPS, CONTEXT = 4, 64
LENGTHS = (19, 23, 11, 30)


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    rng = np.random.default_rng(0)
    return [
        Document(str(n), rng.integers(0, 48, n).astype(np.int32), np.arange(n) >= rng.integers(3, n // 2))
        for n in LENGTHS
    ]


def test_the_loss_of_packed_documents_is_the_loss_of_each_alone(documents: list[Document]) -> None:
    model = tiny.target()
    head, corpus = tiny.head(model), build_corpus(documents)
    pieces = cut(corpus, CONTEXT, STEPS + 3)
    objective = Objective(LOSSES["ce"], STEPS, 0.8)
    packed = pack(pieces, CONTEXT - STEPS - 1)  # a row's last positions begin no pass
    assert len(packed) == 2 and all(len(row) == 2 for row in packed)
    sums, counts = np.zeros((2, STEPS)), np.zeros((2, STEPS), int)
    for i, rows in enumerate((packed, [[piece] for piece in pieces])):
        batch = gather(corpus, rows, CONTEXT, "cpu")
        target = tiny.target_of(model, batch, head.target_ids(torch.arange(32)))
        planned = plan(batch, target, objective)
        counts[i] = [int(p.counts.sum()) for p in planned]
        sums[i] = np.array(ttt_loss(head, batch, target, objective, planned).losses) * counts[i]
    assert counts[0].tolist() == counts[1].tolist() and (counts > 10).all()
    assert np.allclose(sums[0], sums[1], rtol=1e-5)


def test_pieces_in_which_nothing_counts_are_left_out(documents: list[Document]) -> None:
    """A long prompt fills pieces of its own; so does a counted token that no row of its piece predicts."""
    mask = np.zeros(40, np.bool_)
    mask[[16, 17, 39]] = True
    corpus = build_corpus([Document("long", np.arange(40, dtype=np.int32), mask)])
    assert [piece.start for piece in cut(corpus, 8, 4)] == [32]
    assert [piece.start for piece in cut(corpus, 10, 4)] == [10, 30]

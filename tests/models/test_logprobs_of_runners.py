"""Both target runners give the log-probabilities of their own logits, as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from aquiline.models.runner import NativeTarget, TorchTarget
from tests.conftest import TINY, needs_native, tiny_pair


@pytest.mark.parametrize("runner", [pytest.param(NativeTarget, marks=needs_native), TorchTarget])
@pytest.mark.parametrize("k", [0, 1, 7, TINY.vocab_size])
def test_chosen_rank_and_top_are_those_of_the_logits(runner: type[NativeTarget | TorchTarget], k: int) -> None:
    target = runner(tiny_pair()[0], max_rows=12)
    target.hidden[:] = np.random.default_rng(0).normal(0, 1, target.hidden.shape)
    rows = np.array([11, 0, 5, 5, 2], np.int32)
    logits = target.logits(rows)
    order = np.argsort(-logits, axis=1, kind="stable")
    rank = np.array([1, 96, 7, 8, 3])
    chosen = order[np.arange(5), rank - 1].astype(np.int32)

    got = target.logprobs(rows, chosen, k)

    exact = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    assert got.rank.tolist() == rank.tolist() and np.array_equal(got.top.ids, order[:, :k])
    assert np.abs(got.chosen - exact[np.arange(5), chosen]).max() < 1e-5
    np.testing.assert_allclose(got.top.logprobs, np.take_along_axis(exact, order[:, :k], 1), rtol=0, atol=1e-5)
    assert (got.rank.dtype, got.chosen.dtype, got.top.ids.dtype) == (np.int32, np.float32, np.int32)

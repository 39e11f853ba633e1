from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from native_calls import ISAS, LOADED, bits, parts
from test_forward import HIDDEN, random_weights

from aquiline.backends.cpu import calls
from aquiline.backends.torch import reference as ref

EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 1000, 8192, 50_003]
ARITHMETICS = ["float32", "bfloat16"] if LOADED is not None and LOADED.has_bf16_dot() else ["float32"]


def new_model(vocab, arithmetic="float32", edit=None):
    """A model whose head has `vocab` outputs, of which a few are equal; edit(head) may change more."""
    generator = torch.Generator().manual_seed(vocab)
    head = torch.randn(vocab, HIDDEN, generator=generator) * 3 * HIDDEN**-0.5
    head[vocab // 2 :: 7] = head[vocab // 3].clone()
    if edit is not None:
        edit(head)
    return calls.NativeModel(replace(random_weights(), head=parts(head.bfloat16())), arithmetic)


def new_hidden(rows, seed=0):
    return np.random.default_rng(seed).normal(0, 1, (rows, HIDDEN)).astype(np.float32)


def indices(n):
    return np.arange(n, dtype=np.int32)


def flat(result):
    """Every bit of the result, one row of numbers for each of its rows."""
    columns = (result.chosen[:, None], result.rank[:, None], result.top.ids, result.top.logprobs)
    return np.concatenate([bits(np.ascontiguousarray(c)) for c in columns], axis=1)


def check(got, logits, chosen, k):
    """Against a stable sort and log_softmax in double of the same logits."""
    rows = np.arange(len(logits))
    exact = torch.log_softmax(torch.as_tensor(logits).double(), -1).numpy()
    order = np.argsort(-logits, axis=1, kind="stable")
    assert got.chosen.dtype == got.top.logprobs.dtype == np.float32 and got.rank.dtype == got.top.ids.dtype == np.int32
    assert got.chosen.shape == got.rank.shape == (len(logits),) and got.top.logprobs.shape == (len(logits), k)
    assert np.array_equal(got.top.ids, order[:, :k])
    assert np.array_equal(order[rows, got.rank - 1], chosen)
    np.testing.assert_allclose(got.top.logprobs, np.take_along_axis(exact, order[:, :k], 1), rtol=0, atol=1e-5)
    np.testing.assert_allclose(got.chosen, exact[rows, chosen], rtol=0, atol=1e-5)
    among = rows[got.rank <= k]
    assert np.array_equal(bits(got.chosen[among]), bits(got.top.logprobs[among, got.rank[among] - 1]))


@pytest.mark.parametrize("vocab", EDGES)
def test_native_and_reference_match_a_sort_in_double(vocab, isa):
    model, hidden, index = new_model(vocab), new_hidden(6), indices(6)
    hidden[5] = 0  # every logit is equal
    logits = model.logits(hidden, index)
    order = np.argsort(-logits, axis=1, kind="stable")
    for k in sorted({0, 1, min(5, vocab), vocab - 1, vocab}):
        for place in {0, k - 1, k, vocab // 2, vocab - 1}:  # of the chosen token: first, last within k, first outside
            chosen = order[:, min(max(place, 0), vocab - 1)].astype(np.int32)
            check(model.logprobs(hidden, index, chosen, k), logits, chosen, k)
    check(ref.logprobs(torch.as_tensor(logits), torch.as_tensor(chosen).long(), k), logits, chosen, k)


@pytest.mark.parametrize("vocab", [17, 203, 8192])
@pytest.mark.parametrize("arithmetic", ARITHMETICS)
def test_a_row_has_the_same_bits_alone_among_others_on_every_thread_and_isa(vocab, arithmetic):
    model, hidden = new_model(vocab, arithmetic), new_hidden(40)
    chosen = np.random.default_rng(1).integers(0, vocab, 40).astype(np.int32)
    expected = flat(model.logprobs(hidden, indices(40), chosen, 9))
    order = np.random.default_rng(2).permutation(40).astype(np.int32)
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            for size in (1, 3, 16, 17, 40):
                for rows in np.split(order, range(size, 40, size)):
                    got = flat(model.logprobs(hidden, rows, chosen[rows], 9))
                    assert np.array_equal(got, expected[rows]), (isa, threads, size)


def test_the_best_ids_are_those_of_top_k():
    model, hidden, index = new_model(1000), new_hidden(20), indices(20)
    for k in (1, 8, 1000):
        top, got = model.top_k(hidden, index, k), model.logprobs(hidden, index, index, k).top
        assert np.array_equal(got.ids, top.ids) and np.array_equal(bits(got.logprobs), bits(top.logprobs))


def test_logits_rank_where_their_log_probabilities_round_to_one():
    def edit(head):
        head[:] = 0
        head[1, 0] = 2.0**-30

    model, hidden = new_model(2, edit=edit), np.ones((1, HIDDEN), np.float32)
    logits = torch.as_tensor(model.logits(hidden, indices(1)))
    for got in (model.logprobs(hidden, indices(1), indices(1), 2), ref.logprobs(logits, torch.tensor([0]), 2)):
        assert got.top.ids.tolist() == [[1, 0]] and got.rank.tolist() == [2]
        assert got.top.logprobs[0, 0] == got.top.logprobs[0, 1] == got.chosen[0]


def test_no_rows():
    got = new_model(50).logprobs(new_hidden(1), indices(0), indices(0), 3)
    assert got.chosen.shape == got.rank.shape == (0,) and got.top.ids.shape == got.top.logprobs.shape == (0, 3)


@pytest.mark.parametrize("vocab", [1, 70, 203])
def test_logits_that_are_not_numbers(vocab):
    """An infinite weight makes logit 0 NaN, +inf or -inf by the sign of the row's first channel: 0, 1 or -1."""

    def edit(head):
        head[0] = 0
        head[0, 0] = torch.inf

    model, hidden = new_model(vocab, edit=edit), new_hidden(5)
    hidden[:4, 0], hidden[4] = [0, 1, -1, 1], np.nan
    chosen = np.array([vocab - 1, 0, 0, vocab // 2, 0], np.int32)
    logits = model.logits(hidden, indices(5))
    assert np.isnan(logits[0, 0]) and logits[1:4, 0].tolist() == [np.inf, -np.inf, np.inf] and np.isnan(logits[4]).all()
    results = []
    for isa in ISAS:
        calls.select_isa(isa)
        for k in (vocab, 0, 1):
            got = model.logprobs(hidden, indices(5), chosen, k)
            lost = [0, 1, 3, 4] if vocab > 1 else [0, 1, 2, 3, 4]  # alone, -inf leaves nothing finite
            assert np.isnan(got.chosen[lost]).all() and np.isnan(got.top.logprobs[lost]).all()
            assert ((got.top.ids >= 0) & (got.top.ids < vocab)).all()
            twin = ref.logprobs(torch.as_tensor(logits), torch.as_tensor(chosen).long(), k)
            np.testing.assert_allclose(got.chosen, twin.chosen, atol=1e-5)
            np.testing.assert_allclose(got.top.logprobs, twin.top.logprobs, atol=1e-5)
            if vocab > 1:
                assert got.chosen[2] == -np.inf and got.rank[2] == vocab
                alone = model.logprobs(hidden, indices(5)[2:3], chosen[2:3], k)
                assert np.array_equal(flat(alone), flat(got)[2:3]), "broken rows beside it change nothing"
        results.append(flat(got))
    assert all(np.array_equal(result, results[0]) for result in results)

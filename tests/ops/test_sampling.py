from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_calls import ISAS, draw

from aquiline.backends.cpu import calls
from aquiline.backends.torch import reference as ref
from aquiline.types import SAMPLING


def sampling(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=None):
    s = np.zeros(n, SAMPLING)
    s["temperature"], s["top_k"], s["top_p"], s["min_p"], s["seed"] = temperature, top_k, top_p, min_p, seed
    s["position"] = np.arange(n) if position is None else position
    return s


def reference_draws(logits, s, ids=None):
    args = zip(*(s[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position")), strict=True)
    return [
        ref.draw(torch.as_tensor(row), float(t), int(k), float(p), float(m), int(seed), int(position), ids)
        for row, (t, k, p, m, seed, position) in zip(logits, args, strict=True)
    ]


def best_two(row, how, ids):
    """The reference's draw from one row of logits, the runner-up and the margin."""
    t, k, p, m, seed, position = (how[n] for n in ("temperature", "top_k", "top_p", "min_p", "seed", "position"))
    return ref.best_two(torch.as_tensor(row), float(t), int(k), float(p), float(m), int(seed), int(position), ids)


def is_near_tie(logits, s, i, got):
    """Whether float rounding may decide: both tokens' scores, or their ranks at a filter's edge, are within 1e-5."""
    arguments = (float(s["temperature"][i]), int(s["top_k"][i]), float(s["top_p"][i]), float(s["min_p"][i]))
    noise = ref.gumbel(int(s["seed"][i]), int(s["position"][i]), torch.arange(len(logits)))
    scaled = torch.as_tensor(logits) / arguments[0]
    filtered = ref.filter_logits(torch.as_tensor(logits), *arguments) + noise
    if torch.isfinite(filtered[got]):
        return bool(filtered.max() - filtered[got] < 1e-5)
    loosened = ref.filter_logits(
        torch.as_tensor(logits), arguments[0], arguments[1], min(1.0, arguments[2] + 1e-5), arguments[3] * 0.99999
    )
    return bool(torch.isfinite(loosened[got])) and bool((loosened + noise).max() - (scaled + noise)[got] < 1e-5)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 300),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    st.sampled_from([0, 1, 5, 70, 1000]),
    st.sampled_from([0.0, 0.1, 0.7, 0.95, 1.0]),
    st.sampled_from([0.0, 0.02, 0.5, 1.0]),
    st.integers(0, 2**64 - 1),
    st.booleans(),
)
def test_draw_matches_reference(vocab, temperature, top_k, top_p, min_p, seed, ties):
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (8, vocab)).astype(np.float32)
    if ties:
        logits = np.round(logits)
    s = sampling(8, temperature, top_k, top_p, min_p, seed)
    got, expected = draw(logits, s).tolist(), reference_draws(logits, s)
    for i in range(8):
        assert got[i] == expected[i] or is_near_tie(logits[i], s, i, got[i]), (i, got[i], expected[i])


@pytest.mark.parametrize(
    "top_k, top_p, min_p", [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (40, 0.9, 0.05), (0, 1.0, 0.1)]
)
def test_large_vocabulary(top_k, top_p, min_p):
    logits = np.random.default_rng(7).normal(0, 2.5, (3, 50_003)).astype(np.float32)
    s = sampling(3, 0.8, top_k, top_p, min_p, seed=9)
    expected = reference_draws(logits, s)
    for isa in ISAS:
        calls.select_isa(isa)
        for threads in (1, 2, 3):
            calls.set_threads(threads)
            assert draw(logits, s).tolist() == expected, (isa, threads)


def test_broken_logits():
    nan, inf = np.nan, np.inf
    rows = [[0, nan, 1], [-inf, -inf, -inf], [inf, inf, inf], [-inf, 2, -inf], [1, 2, 2]]
    logits = np.tile(np.array(rows, np.float32)[:, :, None], (1, 1, 7)).transpose(0, 2, 1).reshape(5, 21).copy()
    for s in (sampling(5, 0.0), sampling(5, 1.0), sampling(5, 1.0, top_k=4), sampling(5, 1.0, top_p=0.5)):
        got = draw(logits, s)
        assert got[:3].tolist() == [-1, -1, -1] and got[3] % 3 == 1 and got[4] >= 0
    assert draw(logits, sampling(5, 0.0))[3:].tolist() == [1, 1]


def test_draws_follow_the_distribution():
    """20,000 positions of one row against its softmax, within 5 standard deviations."""
    logits = np.tile(np.array([0.0, 1.0, 2.0, -1.0], np.float32), (20000, 1))
    counts = np.bincount(draw(logits, sampling(20000, 1.0, seed=3)), minlength=4)
    p = np.exp(logits[0].astype(np.float64))
    p /= p.sum()
    assert (np.abs(counts - 20000 * p) < 5 * np.sqrt(20000 * p * (1 - p))).all()


def test_two_who_draw_with_the_same_noise_agree_as_often_as_their_laws_overlap():
    """Of distributions p and q that differ by TV in total variation, at least (1 - TV) / (1 + TV) of the draws agree;
    the best guess of q would be right as often as p draws it."""
    rng, n = np.random.default_rng(3), 20000
    logits = rng.normal(0, 1, 60).astype(np.float32)
    near = (logits + rng.normal(0, 0.3, 60)).astype(np.float32)
    s = sampling(n, 1.0, seed=9)
    draws = [draw(np.ascontiguousarray(np.broadcast_to(x, (n, 60))), s) for x in (logits, near)]
    p, q = (np.exp(x) / np.exp(x).sum() for x in (logits, near))
    distance = 0.5 * np.abs(p - q).sum()
    agree = (draws[0] == draws[1]).mean()
    assert agree > (1 - distance) / (1 + distance) - 0.01
    assert agree > 2 * p[q.argmax()] and (draws[0] == q.argmax()).mean() == pytest.approx(p[q.argmax()], abs=0.01)

"""Both backends tell the log-probabilities of the target's own logits, and agree on them."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from tests.backends.playing import WAYS, Player, words
from tests.backends.runs_on import BACKENDS, pair_on
from tests.conftest import TINY, needs_native, tiny_pair, weights_of
from tests.dense import DenseAttention

from aquiline.backends.base import Pair
from aquiline.config import SamplingParams
from aquiline.types import TokenLogprobs

V = TINY.vocab_size
PROMPT = words(90)


@lru_cache
def pair_of(backend: str) -> Pair:
    return pair_on(backend, *weights_of(*tiny_pair()))


@torch.no_grad()
def laws(text: list[int]) -> np.ndarray:
    """Log-probabilities [n, V] behind every token, from one forward without caches."""
    decoder, _ = tiny_pair()
    out = decoder(torch.tensor(text)[None], torch.arange(len(text))[None], DenseAttention(TINY))
    return decoder.logits(out.hidden)[0].double().log_softmax(-1).numpy()


def told(backend: str, way: str, k: int) -> tuple[list[int], list[TokenLogprobs]]:
    """A text, and what was told of it from its second token on. The temperature makes unlikely tokens come."""
    sampling = SamplingParams(max_tokens=24, temperature=2.5, seed=9, logprobs=k, prompt_logprobs=k)
    player = Player(pair_of(backend))
    text = player.add(PROMPT, WAYS[way], sampling, chunk=71)
    player.run(12)
    return text.tokens, text.prompt_logprobs + text.logprobs


@pytest.mark.parametrize("way", ["none", "chain3", "deep"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [0, 1, 7, V])
def test_chosen_rank_and_top_are_those_of_the_logits(k: int, backend: str, way: str) -> None:
    text, entries = told(backend, way, k)
    assert [entry.token_id for entry in entries] == text[1:]
    assert len({entry.rank for entry in entries}) > 30, "tokens of all ranks"
    for row, entry in zip(laws(text), entries, strict=False):
        order = np.argsort(-row, kind="stable")
        assert entry.rank == 1 + order.tolist().index(entry.token_id)
        assert list(entry.top) == order[:k].tolist()
        assert abs(entry.logprob - row[entry.token_id]) < 1e-4
        np.testing.assert_allclose(list(entry.top.values()), row[order[:k]], rtol=0, atol=1e-4)


@needs_native
@pytest.mark.parametrize("way", ["none", "chain3", "static", "dynamic"])
def test_the_backends_agree(way: str) -> None:
    (text, native), (same, twin) = told("native", way, 5), told("torch", way, 5)
    assert text == same
    for ours, theirs in zip(native, twin, strict=True):
        assert (ours.token_id, ours.rank, list(ours.top)) == (theirs.token_id, theirs.rank, list(theirs.top))
        assert abs(ours.logprob - theirs.logprob) < 1e-5

"""The rules by which a token is drawn, written apart from the package: plain numpy in float64, one row at a time.

Nothing here comes from aquiline but the parameters' names, so an engine that is wrong in the same way with and without
speculation still disagrees with this."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from aquiline.config import SamplingParams

Scores = NDArray[np.float64]
Words = NDArray[np.uint64]
WORD = np.uint64(2**32)


def adjusted(logits: Scores, prompt: list[int], output: list[int], params: SamplingParams) -> Scores:
    """Logits [V] after penalties and bias. A prompt's tokens count for the repetition penalty alone."""
    scores = np.array(logits, np.float64)
    for token in {*prompt, *output}:
        by = params.repetition_penalty
        scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
    for token, count in Counter(output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def filtered(scores: Scores, params: SamplingParams) -> Scores:
    """Scores [V] with what top-k, then top-p, then min-p drop at -inf. Ties stand in order of their ids."""
    order = np.argsort(-scores, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    before = np.concatenate(([0.0], np.cumsum(weights)[:-1])) / weights.sum()
    kept = order[((before < params.top_p) & (weights >= params.min_p))]
    result = np.full(len(scores), -np.inf)
    result[kept] = scores[kept]
    return result


def mixed(x: Words) -> Words:
    """A 32-bit hash: lowbias32 of C. Wellons' hash-prospector."""
    x = x ^ (x >> 16)
    x = x * np.uint64(0x7FEB352D) % WORD
    x = x ^ (x >> 15)
    x = x * np.uint64(0x846CA68B) % WORD
    return x ^ (x >> 16)


def gumbel(seed: int, position: int, ids: list[int]) -> Scores:
    """The noise of token ids at an absolute position under a seed of 64 bits."""
    first, second, place = (np.array([w], np.uint64) for w in (seed % 2**32, seed >> 32, position))
    low = mixed(mixed(first ^ np.uint64(0x243F6A88)) ^ second)
    high = mixed(mixed(low ^ place) ^ np.uint64(0x85A308D3))
    bits = mixed(mixed((np.array(ids, np.uint64) * np.uint64(0x9E3779B9) + low) % WORD) ^ high)
    return -np.log(-np.log((bits + 0.5) / 2.0**32))


def scores_of(logits: Scores, prompt: list[int], output: list[int], params: SamplingParams) -> Scores:
    """What the next token is the best of, [V]: given the logits after prompt and output."""
    scores = adjusted(logits, prompt, output, params)
    if params.temperature == 0:
        return scores
    assert params.seed is not None
    noise = gumbel(params.seed, len(prompt) + len(output), list(range(len(scores))))
    return filtered(scores / params.temperature, params) + noise

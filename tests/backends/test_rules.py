"""Penalties, bias, forbidden tokens and masks: every drawn token against an oracle that knows the text before it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pytest
from tests.backends.playing import WAYS, Player, Text, new_pair, words
from tests.conftest import needs_native, tiny_pair, weights_of
from tests.ops.native_calls import draw as draw_rows

from aquiline.backends.base import RowEdits, StepInput, TokenMasks
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.spec.drafting import Chain, Drafting, NoDraft, Proposal
from aquiline.spec.tree import DraftTree
from aquiline.types import SAMPLING, Float32

pytestmark = needs_native

SOME = [WAYS[name] for name in ("none", "chain3", "static", "deep")]
PROMPT = words(21)
BASE = SamplingParams(max_tokens=64, temperature=1.0, seed=11)


@lru_cache
def pair() -> CpuPair:
    return new_pair()


@lru_cache
def scorer() -> Player:
    return Player(pair())


def own_logits(tokens: Sequence[int]) -> Float32:
    """The target's logits behind each token of a text."""
    hidden = scorer().backend.score([np.array(tokens, np.int32)]).hidden
    return pair().target_model.logits(hidden, np.arange(len(tokens), dtype=np.int32))


def adjusted(logits: Float32, before: Sequence[int], num_prompt: int, s: SamplingParams) -> Float32:
    """The rules in numpy, over the whole vocabulary: penalties, then bias, all in float32."""
    counts = np.bincount(before[num_prompt:], minlength=len(logits))
    seen = counts > 0
    either = seen | (np.bincount(before[:num_prompt], minlength=len(logits)) > 0)
    r = np.float32(s.repetition_penalty)
    if r != 1:
        logits = np.where(either, np.where(logits > 0, logits / r, logits * r), logits)
    logits = logits - np.float32(s.presence_penalty) * seen.astype(np.float32)
    logits = logits - np.float32(s.frequency_penalty) * counts.astype(np.float32)
    bias = np.zeros(len(logits), np.float32)
    for token, value in s.logit_bias.items():
        bias[token] = value
    return (logits + bias).astype(np.float32)


def draw(logits: Float32, index: int, s: SamplingParams) -> int:
    how = np.array([(s.temperature, s.top_p, s.min_p, s.top_k, index, s.seed)], SAMPLING)
    return int(draw_rows(logits[None].copy(), how)[0])


def check(text: Text, forbidden: Any = lambda before: ()) -> None:
    """Every token of the output is what the oracle draws."""
    logits = own_logits(text.tokens)
    for index in range(text.num_prompt, len(text.tokens)):
        before = text.tokens[:index]
        row = adjusted(logits[index - 1], before, text.num_prompt, text.sampling)
        row[list(forbidden(before))] = -math.inf
        assert text.tokens[index] == draw(row, index, text.sampling), index


RULES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7}, "presence": {"presence_penalty": 6.0},
    "frequency": {"frequency_penalty": 3.0}, "negative": {"frequency_penalty": -0.4, "repetition_penalty": 0.8},
    "bias": {"logit_bias": {3: 4.0, 5: -math.inf, 90: 2.0}},
    "all": {
        "repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {3: 3.0, 9: -5.0},
        "top_k": 30, "top_p": 0.95,
    },
    "greedy": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "temperature": 0.0},
}  # fmt: skip


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_penalties_and_bias(rules: str, way: Drafting) -> None:
    """Beside a text without rules, whose tokens they do not touch."""
    player = Player(pair())
    text = player.add(PROMPT, way, dataclasses.replace(BASE, **RULES[rules]))
    free = player.add(PROMPT, way, BASE)
    player.run(28)
    check(text)
    check(free)
    assert text.output[:28] != free.output[:28], "the rules must matter"


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_min_tokens(way: Drafting) -> None:
    """End tokens are not drawn before there are so many, counted on each node's own path."""
    ends = frozenset(range(1, 60))
    player = Player(pair())
    counts = (1, 5, 13)
    for count in counts:
        player.add(PROMPT, way, dataclasses.replace(BASE, min_tokens=count), end_token_ids=ends)
    player.run(24)
    for count, text in zip(counts, player.texts, strict=True):
        check(text, lambda before, count=count: ends if len(before) - len(PROMPT) < count else ())  # type: ignore[misc]
        assert ends.isdisjoint(text.output[:count])
    assert any(text.output[count] in ends for count, text in zip(counts, player.texts, strict=True)), "no token later"


@pytest.mark.parametrize("backend", [CpuPair, TorchPair])
@pytest.mark.parametrize("rules", RULES)
def test_rules_along_a_path(rules: str, backend: type[CpuPair] | type[TorchPair]) -> None:
    """Four tokens a step are kept: each was drawn by what stands before it on its own path, the root counted once."""
    sampling = dataclasses.replace(BASE, **RULES[rules], min_tokens=11, bad_words=("said",))
    told: dict[str, Any] = {"end_token_ids": frozenset(range(40, 70)), "bad_words": ((17,),)}
    player = Player(backend(*weights_of(*tiny_pair()), "float32"))
    free = player.add(PROMPT, NoDraft(), sampling, **told)
    player.run(8)
    player.drop(free)
    told["bad_words"] += (tuple(free.output[6:8]),)  # its first token is drafted where its last one is drawn
    plain = player.add(PROMPT, NoDraft(), sampling, **told)
    player.run(40)
    assert plain.output[:7] == free.output[:7] and plain.output[7] != free.output[7]
    text = player.add(
        PROMPT, NoDraft(), sampling, propose=lambda t: Proposal(tuple(plain.tokens[len(t.tokens) :][:3])), **told
    )
    player.run(33)
    assert text.output == plain.output[: len(text.output)]
    assert {len(step.kept) for step in text.steps} == {4}


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_bad_words(way: Drafting) -> None:
    """A word's last token is not drawn where the tokens before it stand: prompt, output and path alike."""
    player = Player(pair())
    free = player.add(PROMPT, way, BASE)
    player.run(28)
    out = free.output
    bad = ((out[0],), (PROMPT[-1], *out[:1]), (*out[3:6],), (out[9], out[10]), (*PROMPT, 7), tuple(range(1, 95)))
    text = player.add(PROMPT, way, dataclasses.replace(BASE, bad_words=("said",)), bad_words=bad)
    player.run(28)

    def forbidden(before: list[int]) -> list[int]:
        return [w[-1] for w in bad if len(w) == 1 or tuple(before[-len(w) + 1 :]) == w[:-1]]

    check(text, forbidden)
    assert out[0] not in text.output
    assert any(forbidden(text.tokens[:i]) != [out[0]] for i in range(len(PROMPT), len(text.tokens))), "words matter"


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_masks(way: Drafting) -> None:
    """Each node draws what its own row of the mask allows; rows that allow all go the fast way. A prompt that ends in
    the step has the last row."""
    rng = np.random.default_rng(0)
    allowed: dict[int, set[int]] = {}

    def masks(tree: DraftTree, step: StepInput) -> TokenMasks:
        """What may stand at an index, the same wherever it is asked for; nothing is forbidden at every third."""
        roots = [len(player.at(d.slot).tokens) for d in step.decodes]  # type: ignore[union-attr]
        at = [
            root + int(depth) for b, root in enumerate(roots)
            for depth in tree.topology.depths[tree.topology.offsets[b] : tree.topology.offsets[b + 1]]
        ] + [chunk.end for chunk in step.chunks if chunk.draws]  # fmt: skip
        bits = np.zeros((len(at), 96), np.uint8)
        for row, index in enumerate(at):
            if index not in allowed:
                allowed[index] = set(range(96)) if index % 3 == 0 else {int(t) for t in rng.integers(0, 96, 24)}
            bits[row, list(allowed[index])] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    player = Player(pair())
    text = player.add(PROMPT, way, BASE)
    ruled = player.add(PROMPT, way, dataclasses.replace(BASE, presence_penalty=1.5))
    player.run(20, masks=masks)
    for each in (text, ruled):
        check(each, lambda before: set(range(96)) - allowed[len(before)])
    assert any(index % 3 for index in allowed)


def test_masks_that_do_not_fit() -> None:
    player = Player(pair())
    text = player.add(PROMPT, Chain(3), BASE)
    player.run(1)
    for shape in ((3, 3), (4, 2), (0, 3)):
        with pytest.raises(ValueError, match=r"masks \[\d, \d\]: must be \[4, 3\]"):
            player.step(masks=lambda tree, step, shape=shape: np.full(shape, -1, np.int32))  # type: ignore[misc]
    player.run(10)
    check(text)


def test_a_mask_that_allows_nothing() -> None:
    """No token can be drawn: -1, as where logits are not numbers; the other slots do not notice."""
    player = Player(pair())
    text, other = player.add(PROMPT, NoDraft(), BASE), player.add(PROMPT, Chain(2), BASE)
    player.run(1)
    player.step(masks=lambda tree, step: np.array([[0, 0, 0], *[[-1, -1, -1]] * 3], np.int32))
    assert text.steps[-1].kept == [-1]
    player.drop(text)
    player.run(8)
    check(other)


@pytest.mark.parametrize("way", SOME, ids=lambda way: way.name)
def test_edits(way: Drafting) -> None:
    """Rules come before an edit, an edit before a mask; rows without an edit go the fast way."""
    rng, by_index = np.random.default_rng(1), dict[int, Float32]()

    def edit(index: int, logits: Float32) -> None:
        """Turns negative logits around, which only commutes with what stands at its own place."""
        logits[:] = np.abs(logits) + by_index.setdefault(index, rng.normal(0, 2, 96).astype(np.float32))

    def indices(tree: DraftTree, step: StepInput) -> list[int]:
        offsets, depths = tree.topology.offsets, tree.topology.depths
        texts = [player.at(decode.slot) for decode in step.decodes]
        found = [len(t.tokens) + int(d) for b, t in enumerate(texts) if t for d in depths[offsets[b] : offsets[b + 1]]]
        return found + [chunk.end for chunk in step.chunks if chunk.draws]

    def edits(tree: DraftTree, step: StepInput) -> RowEdits:
        return [None if index % 3 == 0 else partial(edit, index) for index in indices(tree, step)]

    def masks(tree: DraftTree, step: StepInput) -> TokenMasks:
        bits = np.ones((len(indices(tree, step)), 96), np.uint8)
        bits[:, 7:30] = 0
        return np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    player = Player(pair())
    texts = [player.add(PROMPT, way, dataclasses.replace(BASE, presence_penalty=p)) for p in (0.0, 4.0)]
    player.run(10, edits=edits, masks=masks)
    player.run(20, edits=edits)
    for text in texts:
        logits = own_logits(text.tokens)
        for index in range(text.num_prompt, len(text.tokens)):
            row = adjusted(logits[index - 1], text.tokens[:index], text.num_prompt, text.sampling)
            if index % 3:
                row = np.abs(row) + by_index[index]
            if index < text.num_prompt + 10:
                row[7:30] = -math.inf
            assert text.tokens[index] == draw(row, index, text.sampling), index


def test_edits_that_do_not_fit_and_fail() -> None:
    player = Player(pair())
    text = player.add(PROMPT, Chain(3), BASE)
    player.run(1)
    with pytest.raises(ValueError, match="3 edits beside masks of 4 rows"):
        player.step(masks=lambda tree, step: np.full((4, 3), -1, np.int32), edits=lambda tree, step: [None] * 3)
    with pytest.raises(ValueError, match=r"edited \[5\]: must be \[4\]"):
        player.step(edits=lambda tree, step: [None] * 5)
    with pytest.raises(ZeroDivisionError):
        player.step(edits=lambda tree, step: [None, lambda logits: 1 // 0, None, None])  # type: ignore[list-item]
    player.run(10)
    check(text)

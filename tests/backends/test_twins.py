"""The native backend and its readable twin in torch: the same trees, the same texts, where logits lie apart."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.playing import SAMPLED, WAYS, Player, words
from tests.conftest import GEMMA, TINY, TINY_DRAFT, needs_native, round_to, tiny_pair, weights_of

from aquiline.backends.base import VerifiedTrees
from aquiline.backends.cpu.native_pair import CpuPair
from aquiline.backends.torch.torch_pair import TorchPair
from aquiline.config import SamplingParams
from aquiline.models.model_config import DraftConfig
from aquiline.types import Int32

pytestmark = needs_native

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=64, seed=0), "sampled": SAMPLED,
    "filtered": SamplingParams(max_tokens=64, temperature=1.1, top_k=20, top_p=0.9, seed=5),
    "ruled": SamplingParams(
        max_tokens=64, temperature=1.0, seed=2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={3: 2.0}, min_tokens=9, bad_words=("said",),
    ),
}  # fmt: skip
NORMED = dataclasses.replace(TINY_DRAFT, fc_norm=True, norm_feedback=True)
CASES = [*((name, TINY_DRAFT) for name in SAMPLINGS), ("sampled", NORMED)]


@pytest.mark.parametrize(("name", "draft"), CASES, ids=[*SAMPLINGS, "normed"])
def test_the_same_trees_and_texts(name: str, draft: DraftConfig) -> None:
    """Every shape beside every other, prompts in chunks, rules, and a draft that is fed normed states: root by root,
    node by node."""
    pairs = (
        CpuPair(*weights_of(*tiny_pair(draft=draft)), "float32"),
        TorchPair(*weights_of(*tiny_pair(draft=draft)), "float32"),
    )
    players = [Player(pair, num_slots=len(WAYS)) for pair in pairs]
    for player in players:
        for i, way in enumerate(WAYS.values()):
            bad = ((5, 6), (7,)) if name == "ruled" else ()
            player.add(words(5 + 3 * i, i), way, SAMPLINGS[name], end_token_ids=frozenset((1, 2)), bad_words=bad)
        player.run(12)
    for ours, theirs in zip(*(player.texts for player in players), strict=True):
        assert ours.tokens == theirs.tokens and ours.trees == theirs.trees, ours.drafting
        assert [s.draft_end for s in ours.steps] == [s.draft_end for s in theirs.steps]
        assert [p.draft_end for p in ours.first] == [p.draft_end for p in theirs.first]


TARGETS: dict[str, dict[str, Any]] = {
    "biases and sinks": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "sinks": True},
    "gemma3": GEMMA,
}


def compare(pairs: Sequence[CpuPair | TorchPair], tolerance: float) -> None:
    """Hidden states within a share of the largest, and the same texts, chains and trees."""
    hidden, texts = [], []
    for pair in pairs:
        player = Player(pair, num_slots=2)
        for way in ("chain3", "dynamic"):
            player.add(words(40, 5), WAYS[way], SAMPLED)
        player.run(12)
        texts.append([(text.tokens, text.trees) for text in player.texts])
        hidden.append(pair.open(player.sizes).score([np.array(words(40), np.int32)]).hidden.copy())
    np.testing.assert_allclose(*hidden, rtol=0, atol=tolerance * np.abs(hidden[0]).max())
    assert texts[0] == texts[1], "no near tie in this fixture"


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_targets_of_other_families(dtype: str, name: str) -> None:
    """A target with a bias on every linear and sinks, and one like Gemma 3: hidden states within 1e-4, and the same
    texts."""
    config = dataclasses.replace(TINY, **TARGETS[name])
    pairs = []
    for new in (CpuPair, TorchPair):
        decoder, head = tiny_pair(7, config)
        for module in (decoder, head):
            round_to(module, getattr(torch, dtype))
        pairs.append(new(*weights_of(decoder, head), dtype))
        assert pairs[-1].kv_dtype == ("float32" if dtype == "float32" else "bfloat16")
    tolerance = 1e-4 if dtype == "float32" else 1e-2  # keys that land on the other side of a rounding boundary
    compare(pairs, tolerance)


@pytest.mark.parametrize("name", ["biases and sinks", "gemma3"])
def test_keys_in_eight_bits(name: str) -> None:
    """Hidden states within what a weight that falls on the other side of a half may change, and the same texts: paths
    that move, prompts in chunks, windows and sinks, drafts in the same storage."""
    config = dataclasses.replace(TINY, **TARGETS[name])
    pairs = (
        CpuPair(*weights_of(*tiny_pair(7, config)), "float32", kv_dtype="int8"),
        TorchPair(*weights_of(*tiny_pair(7, config)), "float32", "int8"),
    )
    for pair in pairs:
        assert pair.kv_dtype == "int8" and pair.kv_bytes_per_token() == CpuPair.kv_bytes_per_token(pair)  # type: ignore[arg-type]
    compare(pairs, 1e-2)


@pytest.mark.parametrize("kind", [CpuPair, TorchPair])
def test_a_step_and_its_outcome_can_be_sent_to_another_process(kind: type[CpuPair] | type[TorchPair]) -> None:
    """Prompts in chunks, chains, trees and copies, log-probabilities, rules, and the verified trees."""
    player = Player(kind(*weights_of(*tiny_pair()), "float32"), num_slots=len(WAYS))
    sampling = dataclasses.replace(SAMPLINGS["ruled"], logprobs=2, prompt_logprobs=1)
    for i, way in enumerate(WAYS.values()):
        player.add(words(5 + 3 * i, i), way, sampling, bad_words=((5, 6),))
    for _ in range(4):
        step = player.next_step(player.texts)
        output = player.backend.step(step).read()
        sent, told = pickle.loads(pickle.dumps((step, output)))
        assert sent._replace(admits=()) == step._replace(admits=())
        assert [*map(vars, sent.admits)] == [*map(vars, step.admits)]
        assert told._replace(trees=None) == output._replace(trees=None)
        for ours, theirs in zip(flat(output.trees), flat(told.trees), strict=True):
            assert ours.dtype == theirs.dtype and ours.tolist() == theirs.tolist()
        player.note(step, output)


def flat(trees: VerifiedTrees | None) -> list[Int32]:
    assert trees is not None
    (shape, kept) = trees.drafted.topology, trees.kept
    return [
        shape.parents, shape.depths, shape.offsets, trees.drafted.tokens, kept.path, kept.tokens, kept.num_accepted
    ]  # fmt: skip

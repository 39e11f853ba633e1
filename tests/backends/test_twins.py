"""The native backend and its readable twin in torch: the same trees, the same texts, where logits lie apart."""

from __future__ import annotations

import pytest
from tests.backends.playing import SAMPLED, WAYS, Player, words
from tests.conftest import needs_native, tiny_pair

from aquiline.backends.cpu.pair import CpuPair
from aquiline.backends.torch.pair import TorchPair
from aquiline.config import SamplingParams

pytestmark = needs_native

SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=64, seed=0), "sampled": SAMPLED,
    "filtered": SamplingParams(max_tokens=64, temperature=1.1, top_k=20, top_p=0.9, seed=5),
    "ruled": SamplingParams(
        max_tokens=64, temperature=1.0, seed=2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={3: 2.0}, min_tokens=9, bad_words=("said",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_same_trees_and_texts(name: str) -> None:
    """Every shape beside every other, prompts in chunks, and rules: root by root, node by node."""
    pairs = CpuPair(*tiny_pair(), "float32"), TorchPair(*tiny_pair(), "float32")
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

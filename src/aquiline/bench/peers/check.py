"""Whether a kind of peer runs our model at all: its greedy tokens in float32 beside ours, prompt by prompt."""

from __future__ import annotations

from aquiline.bench.peers.base import PeerSpec, Place
from aquiline.bench.peers.results import agreement
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import NoDraft

CHECK_PROMPTS, CHECK_TOKENS, CHECK_NEEDED = 3, 16, 8
"""A kind is void unless, on each of so many prompts, so many of its first tokens in float32 are ours."""


def check(llm: LLM, spec: PeerSpec, place: Place, prompts: list[list[int]]) -> list[int]:
    """Leading tokens of a kind of peer in float32 that are ours, on each prompt."""
    sampling = SamplingParams(max_tokens=CHECK_TOKENS, ignore_eos=True)
    peer = spec.plain.open(place)
    try:
        found = []
        for prompt in prompts:
            expected = llm.run([prompt], sampling, spec=NoDraft()).outputs[0].token_ids
            found.append(agreement(peer.generate([prompt], CHECK_TOKENS, 0.0).outputs[0], expected, None) or 0)
        return found
    finally:
        peer.close()


def unlike(agreed: list[int]) -> list[str]:
    """Why a kind of peer is void, from how many first tokens are ours on each prompt: one prompt of another text is
    another model, however many agree."""
    if min(agreed) >= CHECK_NEEDED:
        return []
    return [f"its first tokens in float32 are not ours: {', '.join(map(str, agreed))} of {CHECK_TOKENS} agree"]

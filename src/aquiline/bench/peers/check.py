"""Whether a kind of peer computes our model: its greedy tokens in float32 are compared with ours, prompt by prompt."""

from __future__ import annotations

from aquiline.bench.peers.base import PeerSpec, Place
from aquiline.bench.peers.results import agreement
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import NoDraft

CHECK_PROMPTS, CHECK_TOKENS, CHECK_NEEDED = 3, 16, 8
"""CHECK_PROMPTS prompts are continued by CHECK_TOKENS tokens. A kind of peer is void unless at least the first
CHECK_NEEDED of them are ours on every prompt."""


def check(llm: LLM, spec: PeerSpec, place: Place, prompts: list[list[int]]) -> list[int]:
    """For each prompt, how many leading tokens of a kind of peer in float32 are the same as ours."""
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
    """Why a kind of peer is void; empty if it is not. agreed: how many leading tokens are ours on each prompt. One
    prompt with another text is enough, since it shows that the peer computes another model."""
    if min(agreed) >= CHECK_NEEDED:
        return []
    return [f"its first tokens in float32 are not ours: {', '.join(map(str, agreed))} of {CHECK_TOKENS} agree"]

"""Whether a kind of peer computes our model: its greedy tokens are compared with ours, prompt by prompt.

In float32 two engines write the same text of one model for long. On packed blocks every engine rounds the inputs of its
linears in its own way, so near ties fall either way and the texts soon differ. There a peer continues each beginning of
our text by one token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from aquiline.bench.peers.contestants import agreement
from aquiline.bench.peers.names import PeerSpec
from aquiline.bench.peers.peer import Peer, PeerSetup
from aquiline.blocks import PACKED
from aquiline.config import SamplingParams
from aquiline.engine.llm import LLM
from aquiline.spec.drafting import NoDraft

CHECK_PROMPTS, CHECK_TOKENS, CHECK_NEEDED = 3, 16, 8
"""CHECK_PROMPTS prompts are continued by CHECK_TOKENS tokens. A kind of peer is void unless at least the first
CHECK_NEEDED of them are ours on every prompt."""
PACKED_NEEDED = 12
"""On packed blocks, at least PACKED_NEEDED of the CHECK_TOKENS tokens must be ours, wherever they stand."""


@dataclass(frozen=True)
class Checked:
    """How many tokens of a kind of peer are ours on each prompt: leading ones in float32, or, on packed blocks, those
    that continue our own text."""

    counts: tuple[int, ...]
    is_packed: bool = False

    def __str__(self) -> str:
        which = "tokens behind our text" if self.is_packed else "first tokens in float32"
        return f"{', '.join(map(str, self.counts))} of {CHECK_TOKENS} {which}"

    @property
    def problems(self) -> list[str]:
        """Why a kind of peer is void; empty if it is not. One prompt with another text is enough, since it shows that
        the peer computes another model."""
        needed = PACKED_NEEDED if self.is_packed else CHECK_NEEDED
        return [] if min(self.counts) >= needed else [f"it computes another model: only {self} are ours"]


def check(llm: LLM, spec: PeerSpec, setup: PeerSetup, prompts: list[list[int]]) -> Checked:
    """Compare a kind of peer with `llm`, which runs the same weights, one prompt at a time."""
    sampling = SamplingParams(max_tokens=CHECK_TOKENS, ignore_eos=True)
    is_packed = spec.plain.dtype == PACKED
    count = _num_next if is_packed else _num_leading
    room = max(map(len, prompts)) + CHECK_TOKENS + 1
    peer = spec.plain.open(replace(setup, batch=1, max_context=max(setup.max_context, room)))
    try:
        ours = [llm.run([prompt], sampling, drafting=NoDraft()).outputs[0].token_ids for prompt in prompts]
        return Checked(tuple(count(peer, p, ids) for p, ids in zip(prompts, ours, strict=True)), is_packed)
    finally:
        peer.close()


def _num_leading(peer: Peer, prompt: list[int], expected: list[int]) -> int:
    """How many leading tokens are the expected ones."""
    return agreement(peer.generate([prompt], len(expected), 0.0).outputs[0], expected, None) or 0


def _num_next(peer: Peer, prompt: list[int], expected: list[int]) -> int:
    """How many tokens are the expected ones, each after the expected text before it."""
    texts = [prompt + expected[:i] for i in range(len(expected))]
    found = [peer.generate([text], 1, 0.0).outputs[0].token_ids for text in texts]
    return sum(ids == [token] for ids, token in zip(found, expected, strict=True))

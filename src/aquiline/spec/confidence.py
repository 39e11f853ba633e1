"""How the draft's confidence ends a chain: the rule that a backend gets (Cut), and the guesses that it returns (Guess).

The draft draws its next token by noisy scores: logits / temperature plus noise, or the logits themselves at temperature
0. The *margin* is by how much the best of these scores exceeds the second best. A small margin means that the draft
nearly drew its second choice, the *runner-up*, instead. Margins are told apart by buckets.
"""

from __future__ import annotations

from typing import NamedTuple

MARGIN_BOUNDS = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Where each bucket of margins but the first begins. The bounds are powers of two, so every backend compares exactly.
csrc/stages/chains.cpp has the same."""

NUM_MARGINS = len(MARGIN_BOUNDS) + 1
"""Number of buckets of margins."""


class Cut(NamedTuple):
    """How confidence ends a chain. Level d of the chain is drafted with the margin bucket b_d. The chance that its
    token is accepted is s_d = s_(d-1) * chances[b_d], where s_0 = 1.

    chances [NUM_MARGINS]: by bucket, the chance that a drafted token is the target's, given that its parent is.
    seconds [NUM_MARGINS]: by bucket, the chance that the runner-up is the target's token instead.
    least_node: the token of level d is verified if s_d is at least this; otherwise the chain ends above it. The
    runner-up of level d, a leaf beside that token, is verified if s_(d-1) * seconds[b_d] is at least this. With
    infinity nothing but the root is verified.
    least_pass: the draft goes on below the token of level d if the token is verified and s_d is at least this.

    Chances are multiplied and compared in float32."""

    chances: tuple[float, ...]
    seconds: tuple[float, ...]
    least_node: float
    least_pass: float


class Guess(NamedTuple):
    """The draft's guess at one level of a chain. token: the token that it drew; runner_up: its second choice, -1 if no
    second token was possible; margin: the bucket of the margin, the last one if the margin is infinite."""

    token: int
    runner_up: int
    margin: int


def most_nodes(num_levels: int) -> int:
    """The greatest number of nodes of a chain of num_levels levels with a Cut: the root, and a token and a runner-up on
    each level. The max_nodes of a request whose steps have a Cut must not be smaller."""
    return 1 + 2 * num_levels

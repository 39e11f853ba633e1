"""The time of decoding by the wall clock, between the same two instants for every engine, ours included.

The time inside our engine's steps would leave out the time between two steps, which other engines' figures contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aquiline.engine.llm import Output


@dataclass(frozen=True)
class Span:
    """One sequence: its number of tokens, and when the first and the last of them came, in milliseconds since a moment
    that all sequences of a run share."""

    num_tokens: int
    first_ms: float
    last_ms: float


def decode_s(spans: Sequence[Span]) -> float:
    """Seconds from the first token of any sequence to the last. The time of prompts is left out if they ran together;
    all time between two steps is included."""
    return (max(span.last_ms for span in spans) - min(span.first_ms for span in spans)) / 1e3


def decode_tokens_per_s(spans: Sequence[Span]) -> float:
    """Tokens after each sequence's first, per second of decoding; 0 if there was no decoding."""
    seconds = decode_s(spans)
    return sum(span.num_tokens - 1 for span in spans) / seconds if seconds else 0.0


def spans_of(outputs: Sequence[Output]) -> list[Span]:
    """The spans of requests that were submitted together, as LLM.run does. Their arrivals differ by microseconds."""
    return [Span(len(output.token_ids), output.ttft_ms, output.total_ms) for output in outputs]

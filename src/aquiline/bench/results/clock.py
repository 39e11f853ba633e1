"""Decoding by the wall clock: the same two instants for every engine, its own included.

The time inside an engine's steps leaves out what happens between two of them, which other engines' figures contain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aquiline.engine.llm import Output


@dataclass(frozen=True)
class Span:
    """One sequence, in milliseconds since a moment that all sequences of a run share: its number of tokens, when the
    first of them came, when the last."""

    num_tokens: int
    first_ms: float
    last_ms: float


def decode_s(spans: Sequence[Span]) -> float:
    """From the first token of all to the last. The prompts' time is outside as far as they ran together; everything
    between two steps is inside, whoever spends it."""
    return (max(span.last_ms for span in spans) - min(span.first_ms for span in spans)) / 1e3


def decode_tokens_per_s(spans: Sequence[Span]) -> float:
    """Tokens behind each sequence's first per second of decoding; 0 where there is none."""
    seconds = decode_s(spans)
    return sum(span.num_tokens - 1 for span in spans) / seconds if seconds else 0.0


def spans_of(outputs: Sequence[Output]) -> list[Span]:
    """Of requests that were handed over together, as `LLM.run` does: their arrivals are microseconds apart."""
    return [Span(len(output.token_ids), output.ttft_ms, output.total_ms) for output in outputs]

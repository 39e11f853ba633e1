"""What a request's fields ask of the engine: how it drafts, and how long an answer may be."""

from __future__ import annotations

from typing import Any

import pytest

from aquiline.serve.config import Limits
from aquiline.serve.protocol import ChatRequest, CompletionRequest
from aquiline.serve.sampling import chosen_spec, wanted
from aquiline.spec.adaptive import PLENTY, Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup

EXPECTED: dict[str, Any] = {"prediction": {"type": "content", "content": "a"}}


@pytest.mark.parametrize(
    ("default", "asked", "spec"),
    [
        (Adaptive(), {}, Adaptive()),
        (Adaptive(), {"speculative": {"num_tokens": 4}}, Adaptive(4, lookup=False)),
        (Adaptive(), {"speculative": {"num_tokens": PLENTY}}, Adaptive(PLENTY)),
        (Adaptive(), {"speculative": {"num_tokens": 0}}, NoDraft()),
        (Adaptive(), EXPECTED, Adaptive()),
        (Chain(3), EXPECTED, Lookup()),
        (Chain(3), EXPECTED | {"speculative": {"num_tokens": 2}}, Lookup(max_draft=2)),
        (Chain(3), EXPECTED | {"speculative": {"proposer": "chain"}}, Chain(3)),
        (Chain(3), EXPECTED | {"speculative": {"enabled": False}}, NoDraft()),
        (Chain(3), {"speculative": {"proposer": "adaptive"}}, Adaptive()),
    ],
)
def test_how_a_request_is_drafted(default: Drafting, asked: dict[str, Any], spec: Drafting) -> None:
    """A bound on the tokens of a draft bounds its copies too, and a prediction is of use to what reads it."""
    assert chosen_spec(CompletionRequest(prompt="a", **asked), default) == spec


def test_an_answer_of_no_stated_length_has_the_room_there_is_and_no_more_than_is_allowed() -> None:
    request = ChatRequest(messages=[{"role": "user", "content": "a"}])  # type: ignore[list-item]
    asked = wanted(request, Limits(max_output_tokens=50), Chain(3))
    assert [asked.choice(0, room).max_tokens for room in (7, 50, 400)] == [7, 50, 50]

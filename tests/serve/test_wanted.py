"""How a request is drafted for, by its own fields and the server's way."""

from __future__ import annotations

from typing import Any

import pytest

from aquiline.serve.protocol import CompletionRequest
from aquiline.serve.sampling import chosen_drafting
from aquiline.spec.adaptive import MAX_COPY, Adaptive
from aquiline.spec.drafting import Chain, Drafting, NoDraft
from aquiline.spec.lookup import Lookup

EXPECTED: dict[str, Any] = {"prediction": {"type": "content", "content": "a"}}


@pytest.mark.parametrize(
    ("default", "asked", "drafting"),
    [
        (Adaptive(), {}, Adaptive()),
        (Adaptive(), {"num_spec_tokens": 4}, Adaptive(4, lookup=False)),
        (Adaptive(), {"num_spec_tokens": MAX_COPY}, Adaptive(MAX_COPY)),
        (Adaptive(), {"num_spec_tokens": 0}, NoDraft()),
        (Adaptive(), EXPECTED, Adaptive()),
        (Chain(3), EXPECTED, Lookup()),
        (Chain(3), EXPECTED | {"num_spec_tokens": 2}, Lookup(max_draft=2)),
        (Chain(3), EXPECTED | {"drafter": "chain"}, Chain(3)),
        (Chain(3), EXPECTED | {"drafter": "none"}, NoDraft()),
        (Chain(3), {"drafter": "adaptive"}, Adaptive()),
    ],
)
def test_how_a_request_is_drafted(default: Drafting, asked: dict[str, Any], drafting: Drafting) -> None:
    """A bound on the tokens of a draft bounds its copies too, and a prediction is of use to what reads it."""
    assert chosen_drafting(CompletionRequest(prompt="a", **asked), default) == drafting

"""Requests made from the server's own OpenAPI schema, right and wrong ones: no 5xx, and every one is answered."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from tests.conftest import needs_native
from tests.serve.serving import HEADERS, Server

schemathesis = pytest.importorskip("schemathesis", reason="not installed: schemathesis")
pytestmark = [needs_native, pytest.mark.slow]

EXAMPLES = 60


def test_no_request_breaks_the_server(server: Server) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=HEADERS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 10
    for operation in operations:
        for mode in schemathesis.GenerationMode:

            @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
            def check(case: object) -> None:
                reply = case.call(headers=HEADERS, timeout=300)  # type: ignore[attr-defined]
                assert reply.status_code < 500, (reply.status_code, reply.text)

            with suppress(Unsatisfiable):  # an operation without parameters has no wrong ones
                given(case=operation.as_strategy(generation_mode=mode))(check)()
    server.settle()

"""One server for all tests of this folder; its engine process is the only one that most of them need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.serve.serving import ENGINE, KEY, Server, running

from aquiline.engine.llm import LLM
from aquiline.serve.server_config import ServerConfig
from aquiline.spec.drafting import NoDraft


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server with a key, a queue of four and detailed records of speculation."""
    config = ServerConfig(
        api_key=(KEY,), served_model_name=("code", "other"), per_request_spec_decode_metrics="detailed",
        allowed_origins=("http://page.test",),
    )  # fmt: skip
    with running(config) as server:
        yield server


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    """The same target in this process, without speculation: what the server's texts must be."""
    with LLM("bundled", drafting=NoDraft(), engine=ENGINE) as llm:
        yield llm

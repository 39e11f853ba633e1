from __future__ import annotations

import pytest
from native_calls import ISAS, LOADED

from aquiline.backends.cpu import calls


def pytest_collection_modifyitems(items):
    if LOADED is not None:
        return
    for item in items:
        if "/ops/" in str(item.path):
            item.add_marker(pytest.mark.skip(reason=f"no native library: {calls.missing_reason()}"))


@pytest.fixture(autouse=True)
def two_threads():
    if LOADED is not None:
        calls.set_threads(2)
        calls.select_isa(None)
    yield
    if LOADED is not None:
        calls.set_threads(1)
        calls.select_isa(None)


@pytest.fixture(params=ISAS)
def isa(request):
    calls.select_isa(request.param)
    return request.param

"""Tests of kernels. They run on a CUDA device, or in Triton's interpreter, which has to be asked for before kernels are
defined: `make test` runs them in a process of its own, with TRITON_INTERPRET=1."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


@pytest.fixture(autouse=True, scope="session")
def _quick_interpreter() -> Iterator[None]:
    """Triton's interpreter lists the members of its language, to replace some, whenever a function begins. Here it
    lists them once, which saves a quarter of the time of these tests."""
    interpreter = pytest.importorskip("triton.runtime.interpreter", reason="not installed: triton")
    is_builtin = interpreter.tl.core.is_builtin

    @cache
    def names(place: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(place) if is_builtin(member)]

    def replace(place: Any, *how: Any) -> None:
        for name in names(place):
            if is_builtin(member := getattr(place, name)):  # not replaced yet
                interpreter._patch_attr(place, name, member, *how)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(interpreter, "_patch_builtin", replace)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where nothing runs a kernel."""
    from tests.gpu.running import IS_INTERPRETED  # which skips the modules where there is no Triton

    if not IS_INTERPRETED and not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="set TRITON_INTERPRET=1 to run kernels without a CUDA device"))

"""Tests of kernels. They run on a CUDA device, or in Triton's interpreter, which has to be asked for before kernels are
defined: `make test` runs them in a process of its own, with TRITON_INTERPRET=1."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder where nothing runs a kernel."""
    from tests.gpu.running import IS_INTERPRETED  # which skips the modules where there is no Triton

    if not IS_INTERPRETED and not torch.cuda.is_available():
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason="set TRITON_INTERPRET=1 to run kernels without a CUDA device"))

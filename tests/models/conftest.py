from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aquiline.backends.torch.decoder import Decoder, load_target
from checkpoints import write_target


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: a second thread only waits
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 8 layers, float32; tests that change it copy it first."""
    directory = tmp_path_factory.mktemp("target")
    write_target(directory)
    return directory


@pytest.fixture(scope="session")
def target(target_dir: Path) -> Decoder:
    return load_target(target_dir, dtype="float32")

"""A source distribution holds what its wheel is built from, and the wheel what runs without a compiler: 50 MB of data.

pip builds it without an environment of its own, so no network is needed; the library is compiled without optimisation,
in a copy of the tree."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from aquiline.models.known_pairs import PAIRS

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".venv", "build", "tests", "docs", "*.so", "*.egg-info")
MOST_BYTES = 50_000_000

pytestmark = pytest.mark.slow


def run(*command: str, cwd: Path, **settings: str) -> str:
    done = subprocess.run(command, cwd=cwd, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution."""
    pytest.importorskip("setuptools", reason="not installed: setuptools")
    folder = tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, folder / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    run(sys.executable, "setup.py", "-q", "sdist", "-d", "..", cwd=folder / "tree")
    (source,) = folder.glob("*.tar.gz")
    with tarfile.open(source) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    own = {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").rglob("*") if file.is_file()}
    assert own <= names and not [name for name in names if name.endswith(".so")]
    command = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", ".", source.name)
    run(sys.executable, *command, cwd=folder, CXXFLAGS="-O0")
    (built,) = folder.glob("*.whl")
    return built


def test_what_a_wheel_holds(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        sizes = {file.filename: file.file_size for file in packed.infolist()}
    data = sum(size for name, size in sizes.items() if name.startswith("aquiline/data/"))
    assert data <= MOST_BYTES and sizes["aquiline/_native.so"] > 1e6
    draft = "aquiline/data/smollm2/draft/model.safetensors"
    assert sizes[draft] < 0.3 * (PAIRS["smollm2"].draft / "model.safetensors").stat().st_size
    for file in (ROOT / "src" / "aquiline").rglob("*"):
        is_data = file.suffix not in (".py", ".pyc", ".so") and file.is_file()
        assert not is_data or str(file.relative_to(ROOT / "src")) in sizes, f"{file} is not in the wheel"


def test_it_runs_the_bundled_pair_without_a_compiler(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path)
    here = {"PYTHONPATH": str(tmp_path), "PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = (sys.executable, "-c", "from aquiline.cli.main import app; app()")
    options = ("--target", "bundled", "--prompt", "import os", "--max-tokens", "8", "--json", "--drafter", "chain")
    found = json.loads(run(*started, "generate", *options, cwd=tmp_path, **here))
    assert str(tmp_path) in run(sys.executable, "-c", "import aquiline; print(aquiline.__file__)", cwd=tmp_path, **here)
    assert found["system"]["path"] == "native", found["system"]
    drafted = json.loads(run(*started, "inspect", "aquiline/data/smollm2/draft", "--json", cwd=tmp_path, **here))
    assert drafted["problems"] == []

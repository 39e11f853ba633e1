"""What travels to a machine with a GPU and no network: the tracked files and the wheels that it lacks, in one folder.

Such a machine has Python 3.12, torch 2.11 with its Triton and transformers, and takes 64 MiB at most. The chat model's
draft stays here.

    python benchmarks/gpu_bundle.py            # or make gpu-bundle
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("src/aquiline/data/smollm2/draft/",)
MOST_BYTES = 64 * 2**20
TOOLS = ("pytest>=8", "hypothesis>=6.100")
"""Beside what aquiline itself depends on."""
PRESENT = (
    "numpy", "tokenizers", "safetensors", "huggingface_hub", "hf_xet", "ml_dtypes", "pyyaml", "jinja2", "markupsafe",
    "filelock", "fsspec", "tqdm", "typing_extensions", "packaging", "certifi", "idna",
)  # fmt: skip
"""What torch and transformers bring; `--missing` names those that a machine lacks all the same."""
THERE = ("--only-binary=:all:", "--python-version=3.12", "--platform=manylinux_2_28_x86_64",
         "--platform=manylinux2014_x86_64")  # fmt: skip
COMMANDS = """\
python3 -m pip install --no-index --no-deps --target site wheels/*.whl
PYTHONPATH=src:site python3 -m pytest tests/gpu -m 'not slow'
PYTHONPATH=src:site python3 -c 'from aquiline.cli.main import app; app()' doctor"""


def copy_tracked(folder: Path) -> None:
    """The tracked files without what stays here, as they stand in the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if not name.startswith(LEFT_OUT) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def requirements() -> list[str]:
    """What aquiline depends on without extras, and the tools of its tests."""
    return [*tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"], *TOOLS]


def size_problem(folder: Path) -> str:
    """Why the folder may not travel, with its largest files; empty if it may."""
    sizes = {file: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    if sum(sizes.values()) <= MOST_BYTES:
        return ""
    largest = sorted(sizes, key=lambda file: -sizes[file])[:5]
    named = ", ".join(f"{file.relative_to(folder)} {sizes[file] / 2**20:.1f}" for file in largest)
    total = sum(sizes.values()) / 2**20
    return f"the bundle has {total:.1f} MiB of {MOST_BYTES >> 20}; leave more out: {named}"


def main() -> None:
    """Make the bundle, and print what runs there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-bundle", help="folder, made anew")
    parser.add_argument("--missing", nargs="*", default=[], choices=PRESENT, help="what the machine lacks all the same")
    asked = parser.parse_args()
    folder = asked.out
    shutil.rmtree(folder, ignore_errors=True)
    copy_tracked(folder)
    command = [sys.executable, "-m", "pip", "download", "--quiet", *THERE, "--dest", str(folder / "wheels")]
    subprocess.run([*command, *requirements()], check=True)
    for wheel in (folder / "wheels").glob("*.whl"):
        if wheel.name.partition("-")[0].lower() in set(PRESENT) - set(asked.missing):
            wheel.unlink()
    if problem := size_problem(folder):
        sys.exit(problem)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20
    print(f"{folder}: {size:.1f} MiB. Copy it, and there, in that folder:\n{COMMANDS}")


if __name__ == "__main__":
    main()

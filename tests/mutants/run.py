"""Applies small errors to a copy of the tree, one by one, and runs the tests that must notice: `make mutants`.

Exits with 0 if every mutant is killed, 1 if one lives, 2 if a mutant cannot be judged: its text does not stand exactly
once in its file, it does not compile, its tests cannot be collected, or they fail without it."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LISTED = Path(__file__).with_name("mutants.toml")
NEEDED = ("src", "csrc", "tests", "benchmarks", "docs", "results", "setup.py", "pyproject.toml")
LIBRARY = Path("src", "aquiline", "_native.so")
INTERPRETED = {"TRITON_INTERPRET": "1"}
PATIENCE_S = 900
"""A mutant whose tests run for longer hangs them, which is noticed too."""


@dataclass(frozen=True)
class Mutant:
    """`before` stands exactly once in `file` and becomes `after`; then `tests`, as pytest takes them, must fail."""

    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    @property
    def is_native(self) -> bool:
        return self.file.startswith("csrc/")


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: killed, survived or error, after so many seconds, and the last words on it."""

    mutant: Mutant
    kind: str
    seconds: float
    said: str


class CannotJudge(Exception):
    """Something is wrong with a mutant or with the tree it is for."""


def read(file: Path) -> list[Mutant]:
    """All mutants of a list."""
    rows = tomllib.loads(file.read_text())["mutant"]
    return [Mutant(r["name"], r["file"], r["before"], r["after"], tuple(r["tests"])) for r in rows]


def problems(mutants: list[Mutant], root: Path) -> list[str]:
    """What is wrong with the list: texts that do not match, tests that are gone, names that stand twice."""
    found = []
    for mutant in mutants:
        path = root / mutant.file
        count = path.read_text().count(mutant.before) if path.is_file() else 0
        if count != 1:
            found.append(f"{mutant.name}: `before` stands {count} times in {mutant.file}, not once")
        if mutant.before == mutant.after or not mutant.tests:
            found.append(f"{mutant.name}: changes nothing, or names no tests")
        missing = [test for test in mutant.tests if not (root / test.partition("::")[0]).exists()]
        found += [f"{mutant.name}: there is no {test}" for test in missing]
    names = [mutant.name for mutant in mutants]
    return found + [f"{name}: stands twice" for name in sorted({n for n in names if names.count(n) > 1})]


@contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """A copy of a tree made by `prepare`, whose files are hard links: to change one is to replace it."""
    with tempfile.TemporaryDirectory(dir=tree.parent) as place:
        shutil.copytree(tree, place, copy_function=os.link, dirs_exist_ok=True)
        yield Path(place)


def prepare(root: Path, tree: Path) -> None:
    """Copy what the tests need and build the native library. Raises CannotJudge if it does not compile."""
    for name in NEEDED:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        if (root / name).is_dir():
            shutil.copytree(root / name, tree / name, ignore=ignored)
        elif (root / name).is_file():
            shutil.copy2(root / name, tree / name)
    if (tree / "csrc").is_dir():
        build(tree)


def build(tree: Path) -> None:
    """Build the native library in its place, with less optimisation than it is served with, which changes no bit."""
    (tree / LIBRARY).unlink(missing_ok=True)
    shutil.rmtree(tree / "build", ignore_errors=True)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"CXXFLAGS": "-O1"}, capture_output=True, text=True)
    if done.returncode or not (tree / LIBRARY).exists():
        raise CannotJudge(f"does not compile: {last_line(done.stderr)}")


def passes(tree: Path, tests: list[str]) -> tuple[bool, str]:
    """Whether the tests pass in a tree, and the last line of their output. Raises CannotJudge if they do not run.

    Tests of kernels run in a process of their own, interpreted."""
    kernels = [test for test in tests if test.startswith("tests/gpu")]
    others = [test for test in tests if test not in kernels]
    verdicts = [passes_in_one(tree, part, env) for part, env in ((others, {}), (kernels, INTERPRETED)) if part]
    return min(verdicts, key=lambda verdict: verdict[0])


def passes_in_one(tree: Path, tests: list[str], environment: dict[str, str]) -> tuple[bool, str]:
    """The same of tests that share a process."""
    marks = ["-m", "not slow and not gpu"]  # rare ones too
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *marks, *tests]
    own = {"PYTHONPATH": str(tree / "src"), "AQUILINE_THREADS": "1", "OMP_NUM_THREADS": "1"} | environment
    try:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | own, capture_output=True, text=True, timeout=PATIENCE_S
        )
    except subprocess.TimeoutExpired:
        return False, f"hangs: no end after {PATIENCE_S} s"
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    said = last_line("\n".join(failures) or done.stdout)
    if done.returncode not in (0, 1):
        raise CannotJudge(f"pytest ends with {done.returncode}: {said}")
    return done.returncode == 0, said


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["nothing was said"])[-1]


def judge(mutant: Mutant, tree: Path) -> Verdict:
    """Apply one mutant to a copy of the tree and run its tests."""
    began = time.monotonic()
    with copied(tree) as own:
        path = own / mutant.file
        text = path.read_text().replace(mutant.before, mutant.after)
        path.unlink()
        path.write_text(text)
        try:
            if mutant.is_native:
                build(own)
            is_alive, said = passes(own, list(mutant.tests))
            kind = "survived" if is_alive else "killed"
        except CannotJudge as error:
            kind, said = "error", str(error)
    return Verdict(mutant, kind, time.monotonic() - began, said)


def run(mutants: list[Mutant], root: Path, jobs: int = 1) -> int:
    """Judge all mutants, print a line for each, and return the exit status."""
    if found := problems(mutants, root):
        print(*found, sep="\n")
        return 2
    with tempfile.TemporaryDirectory() as place:
        tree = Path(place, "tree")
        tree.mkdir()
        try:
            prepare(root, tree)
            tests = sorted({test for mutant in mutants for test in mutant.tests})
            is_sound, said = passes(tree, tests)
        except CannotJudge as error:
            is_sound, said = False, str(error)
        if not is_sound:
            print(f"the tests do not pass without any mutant: {said}")
            return 2
        kinds = []
        with ThreadPoolExecutor(jobs) as pool:
            for verdict in pool.map(partial(judge, tree=tree), mutants):
                kinds.append(verdict.kind)
                detail = "" if verdict.kind == "killed" else f"\n    {verdict.mutant.file}: {verdict.said}"
                print(f"{verdict.kind:9}{verdict.seconds:6.0f} s  {verdict.mutant.name}{detail}", flush=True)
    print(", ".join(f"{kinds.count(kind)} {kind}" for kind in ("killed", "survived", "error")))
    return 2 if "error" in kinds else int("survived" in kinds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="parts of names or files; all mutants without any")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    options = parser.parse_args()
    chosen = [m for m in read(LISTED) if not options.only or any(o in f"{m.name} {m.file}" for o in options.only)]
    if not chosen:
        parser.error(f"no mutant is named like {options.only}")
    return run(chosen, ROOT, options.jobs)


if __name__ == "__main__":
    sys.exit(main())

"""Builds replay.cpp and runs it: for this machine, and for 64-bit Arm by a cross-compiler and an emulator.

`make arm` runs this module: it builds the library as setup.py does, with the cross-compiler, and makes the recorded
calls on two emulated CPUs, of which one lacks the dot products of bytes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from aquiline.backends.cpu.native import LIBRARY_PATH

ROOT = Path(__file__).resolve().parents[2]
COMPILER, EMULATOR, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
CPUS = {
    "cortex-a72": ("neon", "portable", "amx_twin"),
    "cortex-a76": ("neon_dot", "neon", "portable", "amx_twin"),
}
"""Emulated CPUs, and the instruction sets that the library must find there."""


def missing() -> str | None:
    """What the check for Arm needs and this machine lacks; None if it has all."""
    lacking = [name for name in (COMPILER, EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(lacking)} not found" if lacking else None


def record(file: Path) -> int:
    """Write the file of calls, in a process of its own, since models keep the recorder. Returns how many."""
    done = run([sys.executable, "-m", "tests.native.cases", str(file)])
    return int(re.fullmatch(r"(\d+) calls\n", done).group(1))  # type: ignore[union-attr]


def replayer(compiler: str, library: Path, file: Path) -> Path:
    """Compile replay.cpp against a native library."""
    link = [f"-L{library.parent}", f"-l:{library.name}", f"-Wl,-rpath,{library.parent}"]
    source = str(ROOT / "tests" / "native" / "replay.cpp")
    run([*compiler.split(), "-std=c++17", "-O2", "-iquote", str(ROOT / "csrc"), source, *link, "-o", str(file)])
    return file


def build_arm(folder: Path) -> Path:
    """The native library for 64-bit Arm, built as the package builds its own."""
    where = ["--build-base", str(folder), "--build-lib", str(folder / "lib")]
    run([sys.executable, "setup.py", "-q", "build", *where], CXX=COMPILER)
    return folder / "lib" / LIBRARY_PATH.relative_to(LIBRARY_PATH.parents[1])


def replay(command: list[str], file: Path) -> dict[tuple[str, int], int]:
    """Make the recorded calls. Returns how many were made, by instruction set and threads; all gave the same bits.

    Raises CalledProcessError at the first difference, which it prints."""
    lines = [line.split() for line in run([*command, str(file)]).splitlines()]
    return {(isa, int(threads)): int(calls) for isa, threads, calls in lines}


def replay_on_arm(folder: Path, file: Path) -> dict[str, dict[tuple[str, int], int]]:
    """What `replay` returns, for each emulated CPU."""
    program = replayer(COMPILER, build_arm(folder), folder / "replay")
    return {cpu: replay([EMULATOR, "-cpu", cpu, "-L", str(SYSROOT), str(program)], file) for cpu in CPUS}


def run(command: list[str], **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )  # fmt: skip
    return done.stdout


def main() -> None:
    """Check the library for Arm here, or say what is missing."""
    lacking = missing()
    if lacking is not None:
        sys.exit(f"make arm: {lacking}: apt-get install g++-aarch64-linux-gnu qemu-user")
    folder = ROOT / "build" / "arm"
    folder.mkdir(parents=True, exist_ok=True)
    count = record(folder / "calls.bin")
    for cpu, found in replay_on_arm(folder, folder / "calls.bin").items():
        assert tuple(dict.fromkeys(isa for isa, _ in found)) == CPUS[cpu], f"{cpu}: {found}"
        assert set(found.values()) == {count}, f"{cpu}: {found}, recorded were {count}"
        print(f"{cpu}: {count} calls, every bit as on this machine: {', '.join(CPUS[cpu])}")


if __name__ == "__main__":
    main()

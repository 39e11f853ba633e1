"""Build llama.cpp's server, with which `aquiline compare` runs llamacpp:eagle. Run: python benchmarks/llama_server.py.

llama-cpp-python's source package carries llama.cpp's source, so the server is of the same version as the library that
the other llamacpp peers run in. It is built for this machine's CPU alone, without GPUs, HTTPS or the page it can show;
nothing but that package is fetched. Takes some minutes; a run that was broken off goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from aquiline.bench.peers.llama_server import BINARY, server_folder

PACKAGE = "llama-cpp-python"
DEFAULT_VERSION = "0.3.36"
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release", "BUILD_SHARED_LIBS": "OFF", "GGML_NATIVE": "ON", "GGML_CUDA": "OFF",
    "LLAMA_OPENSSL": "OFF", "LLAMA_BUILD_TESTS": "OFF", "LLAMA_BUILD_EXAMPLES": "OFF", "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_UI": "OFF", "LLAMA_USE_PREBUILT_UI": "OFF", "LLAMA_BUILD_NUMBER": "0",
}  # fmt: skip


def installed_version() -> str:
    """The library's version, so that both are the same llama.cpp."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return DEFAULT_VERSION


def tool(name: str) -> str:
    """A build tool beside this Python or on the PATH."""
    found = shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        raise SystemExit(f"{name}: is not installed; pip install cmake ninja")
    return found


def source(work: Path, package_version: str) -> Path:
    """llama.cpp's source, fetched and unpacked if it is not there."""
    place = work / f"llama_cpp_python-{package_version}"
    if not place.exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", PACKAGE, "--dest", str(work),
             f"{PACKAGE}=={package_version}"], check=True,
        )  # fmt: skip
        with tarfile.open(work / f"{place.name}.tar.gz") as archive:
            archive.extractall(work / "unpacked", filter="data")
        (work / "unpacked" / place.name).replace(place)  # whole or not at all
    return place / "vendor" / "llama.cpp"


def build(source_folder: Path, work: Path, jobs: int, package_version: str) -> Path:
    """The built server, which tells the package's version as its own: it has no commit to tell."""
    folder = work / "build"
    options = OPTIONS | {"CMAKE_MAKE_PROGRAM": tool("ninja"), "LLAMA_BUILD_COMMIT": f"{PACKAGE}-{package_version}"}
    subprocess.run(
        [tool("cmake"), "-S", str(source_folder), "-B", str(folder), "-G", "Ninja",
         *(f"-D{name}={value}" for name, value in options.items())], check=True,
    )  # fmt: skip
    subprocess.run([tool("cmake"), "--build", str(folder), "--target", BINARY, "-j", str(jobs)], check=True)
    return folder / "bin" / BINARY


def main() -> None:
    """Fetch, build, and say where the server is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=server_folder(), help="where it goes (default: %(default)s)")
    parser.add_argument("--version", default=installed_version(), help=f"of {PACKAGE} (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    args = parser.parse_args()
    work = args.folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    built = build(source(work, args.version), work, args.jobs, args.version)
    server = Path(shutil.move(built, args.folder / BINARY))
    subprocess.run([str(server), "--version"], check=True)
    shutil.rmtree(work)
    print(server)
    if args.folder.resolve() != server_folder().resolve():
        print(f"not where compare looks: export AQUILINE_LLAMA_SERVER={server}")


if __name__ == "__main__":
    main()

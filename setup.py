"""Builds the native CPU library, aquiline/_native.so: a plain shared library that backends/cpu/native.py loads with
ctypes.

csrc/kernels/kernels.cpp, integer.cpp and tiles.cpp are compiled once per instruction set, each with its own flags;
csrc/api, csrc/stages and csrc/lookup as baseline code, for the machine that the compiler compiles for. CXX, CXXFLAGS
and LDFLAGS are heeded. Without a working compiler the package still installs, says so, and runs on its slower torch
path.

A wheel holds the chat model's draft in int4.
"""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
COMMON = ["-std=c++17", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]
COMMON += ["-Wno-psabi", "-iquote", str(ROOT / "csrc")]  # vectors are passed between inlined functions only
KERNEL = ["-fno-exceptions", "-fno-rtti"]
FAMILIES = {"x86_64": "x86", "amd64": "x86", "aarch64": "arm", "arm64": "arm"}
"""Machines, as compilers name them, whose instruction sets have kernels of their own."""

AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"]
UNSCHEDULED = ["-fno-schedule-insns"]  # before registers are given, where GCC for Arm would run out of them by it
NEON = ["-march=armv8-a", *UNSCHEDULED]
KERNELS = {
    "x86": {"avx512": AVX512, "avx2": AVX2},
    "arm": {"neon": NEON},
}
"""By family: instruction sets and their flags. Every machine has "portable" besides."""

INTEGER = {
    "x86": {
        "avx512_vnni": ([*AVX512, "-mavx512vnni"], "avx512.h"),
        "avx_vnni": ([*AVX2, "-mavxvnni"], "avx2.h"),
        "avx2": (AVX2, "avx2.h"),
    },
    "arm": {
        "neon_dot": (["-march=armv8.2-a+dotprod", *UNSCHEDULED], "neon.h"),
        "neon": (NEON, "neon.h"),
    },
}
"""By family: instruction sets with integer dot products, their flags, and the header of csrc/simd."""

TILES = {"x86": {"amx": ([*AVX512, "-mavx512vnni", "-mamx-tile", "-mamx-int8", "-mamx-bf16"], "avx512.h")}}
"""By family: instruction sets with tile registers, as INTEGER. Every machine has their twin "amx_twin" besides."""

DOT = {"x86": [*AVX512, "-mavx512bf16"]}
"""By family: the flags of the bfloat16 dot product."""


def family_of(compiler: list[str]) -> str | None:
    """The family of the machines that the compiler compiles for; None for one without kernels of its own."""
    found = subprocess.run([*compiler, "-dumpmachine"], capture_output=True, text=True, check=True)
    return FAMILIES.get(found.stdout.split("-")[0].strip().lower())


def accepts(compiler: list[str], flags: list[str]) -> bool:
    """Whether the compiler knows these flags."""
    command = [*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def simd(name: str, header: str) -> list[str]:
    """The flags by which csrc/simd/simd.h knows its instruction set: a namespace and a header of that folder."""
    return [f"-DAQ_NAMESPACE={name}", f'-DAQ_SIMD="{header}"']


class BuildNative(build_ext):
    """Compiles csrc with per-file flags, which setuptools' own Extension cannot express."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        objects = Path(self.build_temp) / "native"
        objects.mkdir(parents=True, exist_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._compile(objects, target)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            print(
                f"\nWARNING: aquiline's native CPU library was not built ({error}).\n"
                "WARNING: the package works without it, several times slower: install a C++17 compiler, reinstall.\n",
                file=sys.stderr,
            )

    def _compile(self, objects: Path, target: Path) -> None:
        compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()
        family = family_of(compiler)
        kernels = KERNELS.get(family, {}) | {"portable": []}
        integer = INTEGER.get(family, {}) | {"portable": ([], "portable.h")}
        tiles = TILES.get(family, {}) | {"amx_twin": ([], "portable.h")}
        dot = DOT.get(family, [])
        host = [
            file for folder in ("api", "stages", "lookup") for file in sorted((ROOT / "csrc" / folder).glob("*.cpp"))
        ]
        units: list[tuple[str, str, list[str]]] = [(file.stem, f"{file.parent.name}/{file.name}", []) for file in host]
        for isa, flags in kernels.items():
            units.append((isa, "kernels/kernels.cpp", [*KERNEL, *flags, *simd(isa, f"{isa}.h")]))
        for isa, (flags, header) in integer.items():
            units.append((f"integer_{isa}", "kernels/integer.cpp", [*KERNEL, *flags, *simd(isa, header)]))
        for isa, (flags, header) in tiles.items():
            known = (flags, header) if accepts(compiler, flags) else tiles["amx_twin"]
            units.append((f"tiles_{isa}", "kernels/tiles.cpp", [*KERNEL, *known[0], *simd(isa, known[1])]))
        flags = dot if accepts(compiler, dot) else []
        units.append(("dot", "kernels/dot.cpp", [*KERNEL, *flags, *simd("dot", "avx512_bf16.h")]))
        extra, linking = (os.environ.get(name, "").split() for name in ("CXXFLAGS", "LDFLAGS"))
        running = []
        for name, source, flags in units:
            source_file, object_file = str(ROOT / "csrc" / source), str(objects / f"{name}.o")
            command = [*compiler, *COMMON, *flags, *extra, "-c", source_file, "-o", object_file]
            running.append((command, subprocess.Popen(command)))
        failed = [(command, process.returncode) for command, process in running if process.wait() != 0]
        for command, code in failed:
            raise subprocess.CalledProcessError(code, command)
        linked = [str(objects / f"{name}.o") for name, _, _ in units]
        subprocess.run([*compiler, "-shared", "-pthread", *linking, *linked, "-o", str(target)], check=True)

    def get_outputs(self) -> list[str]:
        return [path for path in super().get_outputs() if os.path.exists(path)]

    def copy_extensions_to_source(self) -> None:
        if all(os.path.exists(path) for path in super().get_outputs()):
            super().copy_extensions_to_source()


class BuildData(build_py):
    """Writes the chat model's draft in int4, as it serves: 7 MB in a wheel instead of 26. A checkout keeps bfloat16."""

    def run(self) -> None:
        super().run()
        draft = Path("aquiline", "data", "smollm2", "draft")
        if not self.editable_mode:
            sys.path.insert(0, str(ROOT / "src"))
            from aquiline.models.int4_files import write_int4

            write_int4(ROOT / "src" / draft, Path(self.build_lib) / draft / "model.safetensors")


setup(
    ext_modules=[Extension("aquiline._native", sources=["csrc/api/api.cpp"])],
    cmdclass={"build_ext": BuildNative, "build_py": BuildData},
)

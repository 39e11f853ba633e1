"""Compiles launches for cards that need not be there, by the ptxas that Triton brings, and says what they take."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import compiler as nvidia

from aquiline.ops.triton.launch import ALIGNMENT, Launch

SHARED_BYTES = {90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""What a program may use at most, by compute capability."""
_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
          torch.uint8: "u8", torch.int8: "i8", torch.uint32: "u32"}  # fmt: skip


@dataclass(frozen=True)
class Taken:
    """What a compiled kernel takes: registers a thread, bytes of stack a thread and of shared memory a program.

    layouts: in which each of its reductions of a float tile finds the tile."""

    registers: int
    stack: int
    shared: int
    ptx: str
    layouts: tuple[str, ...]


def compiled(launch: Launch, capability: int) -> Taken:
    """A launch as a card of this compute capability would run it."""
    kernel = launch.kernel
    names = [parameter.name for parameter in kernel.params]
    signature, constants, attributes = {}, dict(launch.constants), {}
    for number, (name, value) in enumerate(zip(names, launch.arguments, strict=False)):
        signature[name] = _type_of(value)
        if value is None:
            constants[name] = None
        elif signature[name] != "fp32" and _is_divisible(name, value, kernel):
            attributes[(number,)] = [["tt.divisibility", 16]]
    signature |= {name: "constexpr" for name in names if name in constants}
    source = triton.compiler.ASTSource(kernel, signature, constants, attributes)
    done: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    registers, stack = _resources(done.asm["cubin"])
    return Taken(registers, stack, done.metadata.shared, done.asm["ptx"], _layouts(done.asm["ttgir"]))


def _type_of(value: torch.Tensor | float | None) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + _NAMES[value.dtype]
    return {int: "i32", float: "fp32", type(None): "constexpr"}[type(value)]


def _is_divisible(name: str, value: Any, kernel: Any) -> bool:
    """Whether Triton would be told that an argument is a multiple of 16. Buffers begin at one."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    [parameter] = [p for p in kernel.params if p.name == name]
    return not parameter.do_not_specialize and value % 16 == 0


def _layouts(ir: str) -> tuple[str, ...]:
    """Shape and layout of the operand of every reduction of a float tile."""
    named = dict(re.findall(r"^(#\w+) = (#.*)$", ir, re.M))
    found = re.findall(r"\"tt.reduce\".*?\}\) : \(tensor<(\d+x\d+xf32), (#\w+)>\)", ir, re.S)
    return tuple(f"{shape} {named[layout]}" for shape, layout in found)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of the only kernel of a cubin."""
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    [(registers, stack)] = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return int(registers), int(stack)

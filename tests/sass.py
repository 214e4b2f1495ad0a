"""Compile kernels for compute capability 9.0, and read their machine code. That needs no GPU."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia as backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?);")


def source_of(
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str],
    aligned: Collection[str] = (),
    unaligned: Collection[str] = (),
) -> ASTSource:
    """Return the source of a kernel for these constants, and ``PDL``. Arguments without a type are integers. Pointers are multiples of
    16, except ``unaligned`` ones and those of which the kernel leaves that open, and so are integers whose names match patterns
    in ``aligned``."""
    constants = {**constants, "PDL": True}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}

    def is_aligned(name: str, given: Any) -> bool:
        if name in unaligned or name in constants:
            return False
        if signature[name].startswith("*"):
            return not given.do_not_specialize_on_alignment
        return any(fnmatchcase(name, pattern) for pattern in aligned)

    pairs = enumerate(zip(kernel.arg_names, kernel.params, strict=True))
    attrs = {(index,): [["tt.divisibility", 16]] for index, pair in pairs if is_aligned(*pair)}
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    return kind(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)


def compile_source(source: ASTSource, warps: int, stages: int = 3, registers: int | None = None, **options: Any) -> Any:
    """Return a kernel that is compiled for compute capability 9.0. With ``registers``, a thread has at most that number of them."""
    options |= {"num_warps": warps, "num_stages": stages, "launch_pdl": True, "maxnreg": registers}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def spilled_bytes(cubin: Path) -> int:
    """Return the bytes of registers that a thread of the kernel in a cubin spills, or other bytes of its stack."""
    stack = re.search(r"STACK:(\d+)", printed("-res-usage", cubin))
    assert stack is not None
    return int(stack[1])


def printed(option: str, cubin: Path) -> str:
    """Return what ``cuobjdump`` prints about a cubin."""
    command = [Path(backends.__file__).parent / "bin" / "cuobjdump", option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def without_spills(source: ASTSource, cubin: Path, warps: int, stages: int = 3, **options: Any) -> Any:
    """Return the code of a kernel, of which the machine code is in the file ``cubin``, and assert that it spills no registers."""
    code = compile_source(source, warps, stages, **options).asm
    cubin.write_bytes(code["cubin"])
    assert spilled_bytes(cubin) == 0, f"registers are spilled: {printed('-res-usage', cubin)}"
    return code


def unwritten(cubin: Path) -> list[str]:
    """Return the instructions of compute capability 9.0 that read a uniform register that no instruction before them, in the
    order of the code, has written. Descriptors of matrices in shared memory are in such registers."""
    written: set[int] = set()
    found = []
    instructions = _INSTRUCTION.findall(printed("-sass", cubin))
    assert instructions, "cuobjdump printed no instructions that are known here"
    for operation, arguments in instructions:
        first, _, rest = arguments.partition(",")
        writes = operation.startswith(("U", "R2UR", "S2UR", "VOTEU", "REDUX"))
        read = _descriptors(arguments) if "gdesc[" in arguments else _registers(rest if writes else arguments)
        if not written.issuperset(read):
            found.append(f"{operation} {arguments}")
        if writes:
            width = {".64": 2, ".128": 4}.get(next(iter(re.findall(r"\.(?:64|128)\b", operation)), ""), 1)
            width = 2 if ".WIDE" in operation else width
            written.update(number + more for number in _registers(first) for more in range(width))
    return found


def _registers(arguments: str) -> list[int]:
    return [int(number) for number in re.findall(r"\bUR(\d+)", arguments)]


def _descriptors(arguments: str) -> list[int]:
    """Return the registers of both descriptors of a product, or of the second, if the first matrix is in registers."""
    (first,) = _registers(arguments[arguments.index("gdesc[") :].partition("]")[0])
    in_registers = re.search(r"\bR\d+, R\d+, gdesc\[", arguments)
    return [first + 2, first + 3] if in_registers else [first, first + 1, first + 2, first + 3]

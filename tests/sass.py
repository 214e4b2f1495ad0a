"""Compile kernels for compute capability 9.0, and read their machine code. That needs no GPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton
from triton.backends import nvidia as backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s+(.*?);")


def printed(option: str, cubin: Path) -> str:
    """Return what ``cuobjdump`` prints about a cubin."""
    command = [Path(backends.__file__).parent / "bin" / "cuobjdump", option, cubin]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def without_spills(source: ASTSource, options: dict[str, Any], cubin: Path) -> Any:
    """Return the code of a kernel, of which the machine code is in the file ``cubin``, and assert that it spills no registers."""
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    cubin.write_bytes(code["cubin"])
    usage = printed("-res-usage", cubin)
    stack = re.search(r"STACK:(\d+)", usage)
    assert stack is not None
    assert int(stack[1]) == 0, f"registers are spilled: {usage}"
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

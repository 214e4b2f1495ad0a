"""Test that the quick interpreter computes what the usual one computes, and leaves ``triton.language`` as it was.

Run: TRITON_INTERPRET=1 python -m pytest tests/triton/test_quick_interpreter.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _computed(a, b, KIND: tl.constexpr):
    tl.static_assert(KIND != "refused")
    return a * b if KIND == "mul" else a + b if KIND == "add" else a - b


@triton.jit
def _kernel(a, b, out, KIND: tl.constexpr, N: tl.constexpr):
    each = tl.arange(0, N)
    tl.store(out + each, _computed(tl.load(a + each), tl.load(b + each), KIND))


def _run(kind: str, dtype: torch.dtype, a: list[int], b: list[int]) -> list[int]:
    out = torch.zeros(len(a), dtype=dtype)
    constants: dict[str, Any] = {"KIND": kind, "N": len(a)}
    _kernel[(1,)](torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype), out, **constants)
    return out.tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["add", "sub", "mul"])
def test_integers_are_those_of_torch_when_they_overflow_too(kind: str, dtype: torch.dtype) -> None:
    most, least = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    first, second = [most, least, most, 7], [most, most, 2, 3]
    expected = getattr(torch, kind)(torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype))
    assert _run(kind, dtype, first, second) == expected.tolist()


def test_functions_of_the_language_are_restored() -> None:
    names = [name for name in vars(tl) if not name.startswith("__")]
    before = [getattr(tl, name) for name in names]
    for _ in range(2):
        assert _run("add", torch.int32, [1, 2], [3, 4]) == [4, 6]
        with pytest.raises(InterpreterError):
            _run("refused", torch.int32, [1, 2], [3, 4])
        assert all(getattr(tl, name) is value for name, value in zip(names, before, strict=True))

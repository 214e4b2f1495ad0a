"""Run interpreted Triton kernels in a third of the time, with the same results.

Most of the interpreter's time went into work that it repeats or whose result it does not use. Each call of a device function replaces
the functions of ``triton.language`` again, which the kernel that calls it has replaced already. Each operation builds a table of dtypes.
And each addition, subtraction and multiplication of integers is followed by further operations that compute whether it overflows, for
a check that the interpreter leaves out unless its option ``debug`` is set.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Change Triton's interpreter while the context is entered. A version whose interpreter has other functions is left as it is."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    changed = ("_patch_lang", "_patch_builtin", "_LangPatchScope", "_get_np_dtype")
    if not all(hasattr(interpreter, name) for name in changed):
        yield
        return
    overflow = "binary_op_sanitize_overflow_impl"
    with (
        patch.object(interpreter, "_patch_lang", _once(interpreter._patch_lang, (tl, tl.core))),
        patch.object(interpreter, "_patch_builtin", _by_name(interpreter._patch_attr, tl.core.is_builtin)),
        patch.object(interpreter, "_get_np_dtype", _remembered(interpreter._get_np_dtype)),
        patch.object(TritonSemantic, overflow, _unless_ignored(getattr(TritonSemantic, overflow))),
    ):
        yield


def _once(usual: Callable[..., Any], languages: tuple[ModuleType, ...]) -> Callable[..., Any]:
    """Return ``_patch_lang`` that does nothing for device functions of a kernel that is patched."""
    of_functions: dict[FunctionType, frozenset[int]] = {}
    patched: set[int] = set()
    nothing = SimpleNamespace(restore=lambda: None)

    def patch_lang(fn: FunctionType) -> Any:
        if fn not in of_functions:
            given = {id(value) for value in fn.__globals__.values()}
            of_functions[fn] = frozenset(given & {id(each) for each in languages})
        if of_functions[fn] and of_functions[fn] <= patched:
            return nothing
        is_kernel, scope = not patched, usual(fn)
        patched.update(of_functions[fn])
        if is_kernel:
            restore = scope.restore

            def restore_and_forget() -> None:
                restore()
                patched.clear()

            scope.restore = restore_and_forget
        return scope

    return patch_lang


def _by_name(patch_attr: Callable[..., None], is_builtin: Callable[[object], bool]) -> Callable[..., None]:
    """Return ``_patch_builtin`` that looks at all members of a class or module once."""
    names: dict[object, list[str]] = {}

    def patch_builtin(pkg: object, builder: object, scope: object) -> None:
        if pkg not in names:
            names[pkg] = [name for name, member in inspect.getmembers(pkg) if is_builtin(member)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if is_builtin(member):
                patch_attr(pkg, name, member, builder, scope)

    return patch_builtin


def _remembered(usual: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Return ``_get_np_dtype`` that finds the dtype of each scalar type once."""
    found: dict[str, np.dtype[Any]] = {}

    def get_np_dtype(tt_dtype: Any) -> np.dtype[Any]:
        name = tt_dtype.scalar.name
        if name not in found:
            found[name] = usual(tt_dtype)
        return found[name]

    return get_np_dtype


def _unless_ignored(usual: Callable[..., None]) -> Callable[..., None]:
    """Return the check of integers that calls ``usual`` only if its result is used."""

    def check(self: Any, lhs: Any, rhs: Any, binary_op: Callable[..., Any]) -> None:
        if self.builder.options.debug:
            usual(self, lhs, rhs, binary_op)

    return check

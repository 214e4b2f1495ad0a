"""Give a kernel the same key in Triton's cache in every process.

Up to Triton 3.7 the key of a kernel covers the module constants that are used by a function which it calls only if the key of that function was computed
before (https://github.com/triton-lang/triton/pull/10494). A kernel that a process compiled ahead, after another kernel that calls the same function, had
another key there than in the engine, which compiled it once more while a request waited.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.runtime import jit


def hash_callees_first() -> None:
    """Have Triton compute the keys of the functions that a kernel calls before its own. Calls after the first do nothing."""
    finder: Any = getattr(jit, "DependenciesFinder", None)
    merge = getattr(finder, "_update_hash", None)
    if merge is None or hasattr(merge, "__wrapped__"):
        return

    @functools.wraps(merge)
    def update_hash(self: Any, func: Any) -> None:
        func.cache_key  # noqa: B018 (computes the key, and with it the constants that are merged)
        merge(self, func)

    finder._update_hash = update_hash

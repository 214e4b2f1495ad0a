"""Test that the keys of kernels in Triton's cache do not depend on the kernels whose keys were computed before.

Run: pytest tests/core/test_cache_keys.py
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from types import ModuleType

import pytest

from dovetail.ops.triton.cache_keys import hash_callees_first
from dovetail.ops.triton.launch import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted, and have no keys")

KERNELS = """
import triton
import triton.language as tl

LEAST = tl.constexpr(2.0)

@triton.jit
def bounded(x):
    return tl.maximum(x, LEAST)

@triton.jit
def doubled(x):
    return 2 * bounded(x)

@triton.jit
def first(out):
    tl.store(out, bounded(1.0))

@triton.jit
def second(out):
    tl.store(out, doubled(1.0))

@triton.jit
def third(out):
    tl.store(out, bounded(1.0) + doubled(1.0))
"""


def loaded(path: Path, name: str) -> ModuleType:
    """Return the kernels in ``path``, of which no key was computed."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_keys_do_not_depend_on_the_order_in_which_they_are_computed(tmp_path: Path) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(KERNELS)
    found = set()
    for order in itertools.permutations(("first", "second", "third")):
        module = loaded(path, "kernels_" + "_".join(order))
        keys = {name: getattr(module, name).cache_key for name in order}
        found.add(tuple(keys[name] for name in ("first", "second", "third")))
    assert len(found) == 1


def test_a_constant_of_a_function_that_is_called_is_part_of_the_key(tmp_path: Path) -> None:
    keys = []
    for number, text in enumerate((KERNELS, KERNELS.replace("2.0", "3.0"))):
        (path := tmp_path / f"kernels_{number}.py").write_text(text)
        keys.append(loaded(path, path.stem).second.cache_key)
    assert keys[0] != keys[1]


def test_what_was_changed_is_not_changed_again() -> None:
    from triton.runtime import jit

    before = jit.DependenciesFinder._update_hash
    hash_callees_first()
    assert jit.DependenciesFinder._update_hash is before

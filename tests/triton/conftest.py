"""Run Triton kernels interpreted on the CPU; their tests are collected only if TRITON_INTERPRET=1 was set before Python started.

TRITON_INTERPRET=1 python -m pytest tests/triton
"""

import os
from collections.abc import Iterator

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def _independent_rows() -> Iterator[None]:
    """Compute products row by row, because tests here compare bits of kernels whose ``tl.dot`` would otherwise be
    BLAS's."""
    from dovetail.testing.interpreted import independent_rows

    with independent_rows():
        yield


@pytest.fixture(scope="session", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    from quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield

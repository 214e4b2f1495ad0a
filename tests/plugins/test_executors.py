"""Test the executors: the suite for each, and what is particular to one of them.

Run: python -m pytest -q tests/plugins/test_executors.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from dovetail.testing.executor import ExecutorSuite


class TestLocal(ExecutorSuite):
    name = "local"


class TestWorkers(ExecutorSuite):
    name = "workers"
    settings: ClassVar[Mapping[str, Any]] = {"step_seconds": 3.0}
    deadline_seconds = 3.0

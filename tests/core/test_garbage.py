"""Test pauses of the collector of garbage.

.venv/bin/python -m pytest -q tests/core/test_garbage.py
"""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from dovetail.garbage import pause_collections


def test_collections_that_are_disabled_stay_so():
    gc.disable()
    try:
        with pause_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(ValueError, match="broken"), pause_collections():
        raise ValueError("broken")
    assert gc.isenabled()


def test_collections_go_on_after_the_last_of_several_pauses():
    """A thread may import a module while another captures a graph, and end before or after it."""
    first, second = pause_collections(), pause_collections()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


FAILED_START = """
import gc
from dovetail import LLM
from dovetail.engine import engine
def load_weights(*given, **more):
    assert gc.get_freeze_count() > 0
    raise ValueError("no weights")
engine.load_weights = load_weights
try:
    LLM("tiny", device="cpu", grammar="none")
except ValueError as error:
    print(error, gc.get_freeze_count())
"""


def test_an_engine_that_cannot_be_built_leaves_nothing_frozen():
    """What is frozen is never collected, also if its owner drops it."""
    done = subprocess.run([sys.executable, "-c", FAILED_START], capture_output=True, text=True, timeout=60)
    assert done.stdout == "no weights 0\n", done.stderr

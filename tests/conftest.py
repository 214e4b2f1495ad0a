"""Configure every test run."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))  # tests in every folder import fresh.py by its name

# A background job of a script ignores SIGINT, and so do its children. Tests of Ctrl-C need Python's handler.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests run in parallel, and small models gain nothing from more threads: libgomp's threads spin at every barrier,
# so two test processes with two threads each would wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from missing_tools import pytest_terminal_summary  # noqa: F401
from quick_engines import _engines_are_built_quickly, _what_is_there_is_set_apart  # noqa: F401
from usual_run import add_full

# The same examples in every run, so that a failure is repeatable; `make fuzz` searches for new examples.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile("repeatable")

LONG = ("test_parsers_enforced.py",)
"""Files that take half a minute and would be the last of a run, with nothing left for the other workers."""


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of torch's threads. It is restored after the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what the usual run leaves out, and move ``LONG`` to the front."""
    add_full(items)
    items.sort(key=lambda item: item.path.name not in LONG)

"""Settings of every test run."""

import email
import functools
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests of every folder import fresh.py by its name

# Tests run beside each other, and small models gain nothing from more threads: libgomp's threads spin at every barrier,
# so two test processes with two threads each would wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _engines_are_built_quickly() -> Iterator[None]:
    """Hundreds are built, and most of their time went into two things that are long only here.

    Each collects all garbage twice, which looks at all that was imported and collected before the first test: it is set
    apart here, for good. An engine also freezes what it is made of, until the next one comes; that would give these objects
    back to the collector. And each looks for plugins, reading the metadata of everything installed: the same text is parsed
    once.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", _nothing)
        patch.setattr(gc, "unfreeze", _nothing)
        patch.setattr(email, "message_from_string", functools.lru_cache(512)(email.message_from_string))
        yield
    gc.unfreeze()


def _nothing() -> None:
    pass

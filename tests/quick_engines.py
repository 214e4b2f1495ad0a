"""Engines of tests are built quickly: a pytest plugin, for this suite and for those that its tests run (``-p quick_engines``).

Hundreds are built, and most of their time went into two things that are long only here. Each collects all garbage twice, which looks
at all that was imported and made before: it is set apart when a session begins, and again with each module, for good. An engine also
freezes what it is made of, until the next one comes; that would give these objects back to the collector. And each looks for plugins,
reading the metadata of everything installed: the same text is parsed once.
"""

import email
import functools
import gc
from collections.abc import Iterator

import pytest

_freeze, _unfreeze = gc.freeze, gc.unfreeze


@pytest.fixture(scope="session", autouse=True)
def _engines_are_built_quickly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", _nothing)
        patch.setattr(gc, "unfreeze", _nothing)
        patch.setattr(email, "message_from_string", functools.lru_cache(512)(email.message_from_string))
        yield
    _unfreeze()


@pytest.fixture(scope="module", autouse=True)
def _what_is_there_is_set_apart(_engines_are_built_quickly: None) -> None:
    gc.collect()
    _freeze()


def _nothing() -> None:
    pass

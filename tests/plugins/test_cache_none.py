"""Test the cache that keeps nothing.

Run: python -m pytest -q tests/plugins/test_cache_none.py
"""

from __future__ import annotations

from dovetail.testing.cache import PrefixCacheSuite


class TestNone(PrefixCacheSuite):
    name = "none"
    examples = 5

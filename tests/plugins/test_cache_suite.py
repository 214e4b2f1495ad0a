"""Test that the conformance suite of prefix caches passes correct caches; tests/mutations has the wrong ones.

Run: python -m pytest -q tests/plugins/test_cache_suite.py
"""

from __future__ import annotations

import pytest

from dovetail.interfaces.cache import CacheContext, GroupDescriptor, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.cache_reference import ReferenceCache
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache


@pytest.mark.parametrize("cache_class", [RadixCache, ReferenceCache])
def test_the_right_caches_pass(cache_class: type[PrefixCache]):
    class Suite(PrefixCacheSuite):
        name = "right"

        def make(self, page_size: int, num_groups: int = 1) -> PrefixCache:
            return cache_class(RadixConfig(), CacheContext(page_size, (GroupDescriptor(),) * num_groups))

        def offers(self, feature: Feature) -> bool:
            return True

    Suite().test_agrees_with_a_dictionary(4, 2)

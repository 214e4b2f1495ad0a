"""Test that the conformance suite of prefix caches passes correct caches; tests/mutations has the wrong ones.

Run: python -m pytest -q tests/plugins/test_cache_suite.py
"""

from __future__ import annotations

import pytest

from dovetail.interfaces.cache import CacheContext, PrefixCache
from dovetail.interfaces.features import Feature
from dovetail.testing.cache import PrefixCacheSuite
from dovetail.testing.cache_groups import MIXED
from dovetail.testing.cache_reference import ReferenceCache
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache


@pytest.mark.parametrize("cache_class", [RadixCache, ReferenceCache])
def test_the_right_caches_pass(cache_class: type[PrefixCache]):
    class Suite(PrefixCacheSuite):
        name = "right"

        def make_for(self, context: CacheContext) -> PrefixCache:
            return cache_class(RadixConfig(), context)

        def offers(self, feature: Feature) -> bool:
            return True

    Suite().test_agrees_with_a_dictionary(4, 2)
    Suite().test_groups_agree_with_a_dictionary(MIXED, 4)
    Suite().test_requests_lose_no_page(MIXED)
    Suite().test_no_page_behind_the_window_is_needed()
    Suite().test_a_hole_is_filled()
    Suite().test_a_snapshot_is_found_at_exactly_its_length()
    Suite().test_a_lock_protects_the_window_and_the_snapshot()
    Suite().test_similar_prompts_find_what_they_share(40)

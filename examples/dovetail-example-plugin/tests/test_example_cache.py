from dovetail.testing.cache import PrefixCacheSuite


class TestCache(PrefixCacheSuite):
    name = "example_pages"

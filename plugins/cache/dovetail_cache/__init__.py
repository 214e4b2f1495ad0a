"""Prefix caches: ``radix`` and ``none``."""

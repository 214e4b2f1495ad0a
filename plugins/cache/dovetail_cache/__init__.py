"""Provide the prefix caches ``radix`` and ``none``."""

"""Drafters: ``ngram``."""

"""Provide the parts of benchmarks/grammar.py."""

"""Parts of benchmarks/grammar.py."""

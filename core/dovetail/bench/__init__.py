"""Measure servers and engines; this package implements ``dovetail bench``."""

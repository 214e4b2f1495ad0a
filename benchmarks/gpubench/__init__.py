"""Provide the parts of ``gpu.py``: what is measured, the processes that measure it, the targets, and the report."""

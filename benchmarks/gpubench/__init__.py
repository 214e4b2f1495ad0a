"""The parts of ``gpu.py``: what is measured, the processes that do it, what it must reach, and the report."""

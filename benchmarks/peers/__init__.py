"""The arms of ``cpu.py``: what is measured, the processes that do it, and the report."""

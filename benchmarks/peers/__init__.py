"""Define the arms of ``cpu.py``: what is measured, the processes that measure it, and the report."""

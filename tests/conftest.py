"""Settings of every test run."""

import os

# Tests run beside each other, and small models gain nothing from more threads: libgomp's threads spin at every barrier,
# so two test processes with two threads each would wait for each other most of the time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

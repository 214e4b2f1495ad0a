"""Compute attention in Triton: one kernel for every kind of row, a schedule that is made on the device, and a merge."""

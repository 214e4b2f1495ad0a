"""Attention in Triton: one kernel for every kind of row, a schedule made on the device, and a merge."""

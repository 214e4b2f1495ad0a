"""Run each rank in a process of its own, on this host."""

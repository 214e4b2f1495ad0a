"""Provide the schedule policies ``fcfs``, ``lpm``, ``dfs_weight`` and ``priority``."""

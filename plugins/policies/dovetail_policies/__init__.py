"""Schedule policies: ``fcfs``, ``lpm``, ``dfs_weight`` and ``priority``."""

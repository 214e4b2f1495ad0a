"""Name the settings that are negotiated together with components, because components may depend on their values."""

from __future__ import annotations

OVERLAP, MIXED, GRAPHS = "scheduler.overlap", "scheduler.mixed", "graphs.decode"
BATCH_INVARIANT, MIN_PROBABILITY = "batch_invariant", "scheduler.min_draft_probability"
TENSOR_PARALLEL, ATTENTION_DIVISION = "parallel.tp", "parallel.attention"
SETTINGS = (OVERLAP, MIXED, GRAPHS, BATCH_INVARIANT, MIN_PROBABILITY, TENSOR_PARALLEL, ATTENTION_DIVISION)

"""Name the settings that take part in the negotiation, because components may object to a value of them."""

from __future__ import annotations

OVERLAP, MIXED, GRAPHS = "scheduler.overlap", "scheduler.mixed", "graphs.decode"
BATCH_INVARIANT, MIN_PROBABILITY = "batch_invariant", "scheduler.min_draft_probability"
SETTINGS = (OVERLAP, MIXED, GRAPHS, BATCH_INVARIANT, MIN_PROBABILITY)

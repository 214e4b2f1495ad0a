"""Two configs against each other: what they answer, how fast, and how sure that is. ``dovetail ab``."""

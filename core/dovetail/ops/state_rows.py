"""Advance states over the drafts of rows that were accepted, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch


def accepted_tokens(
    slots: torch.Tensor, starts: torch.Tensor, counts: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield for the first, second, ... accepted token the indices of the tokens of all rows that have one, and the slots of
    these rows. Row r has the tokens ``[starts[r], starts[r] + counts[r])`` and slot ``slots[r]``."""
    for index in range(int(counts.max()) if len(counts) else 0):
        live = counts > index
        yield (starts[live] + index).long(), slots[live]

"""Hold what a layer adds to the residual stream in other forms than a tensor."""

from __future__ import annotations

from typing import NamedTuple

import torch

from dovetail.interfaces.mesh import Collectives


class Parts(NamedTuple):
    """Hold a product that was split along its inner dimension (split-K): float32 ``[parts, tokens, out]``. The kernel
    that reads it adds the parts up in their order, so that the programs that computed them need not wait for each
    other. Only products on CUDA are returned in this form.
    """

    addends: torch.Tensor


class RankAddend(NamedTuple):
    """Hold what this rank adds to a product that is divided among ranks: ``x [tokens, out]``, or parts of it if ``tp``
    adds these up (see ``Collectives.all_reduce_norm``). ``tp`` adds up the addends of all ranks, together with the
    residual and the norm that follow."""

    x: torch.Tensor
    tp: Collectives


class Summed(NamedTuple):
    """Hold the sum ``total [tokens, out]`` of the residual stream and of what a layer adds, which the layer has added
    itself."""

    total: torch.Tensor


Addend = torch.Tensor | Parts | RankAddend | Summed
"""What a layer adds to the residual stream. Only ``add_forward`` of norms accepts the forms that are not tensors."""


def sum_addends(first: Addend, second: Addend) -> Addend:
    """Return the sum of what two layers add, such as attention and the MLP of a parallel block, so that it is added up
    once, over parts and over ranks. Mutates nothing."""
    if isinstance(first, RankAddend) and isinstance(second, RankAddend):
        assert first.tp is second.tp
        return RankAddend(_sum(first.x, second.x), first.tp)
    assert not isinstance(first, RankAddend | Summed)
    assert not isinstance(second, RankAddend | Summed)
    x, y = (one.addends if isinstance(one, Parts) else one for one in (first, second))
    total = _sum(x, y)
    return Parts(total) if total.ndim == 3 else total


def _sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return ``x + y``, both ``[tokens, out]`` or parts ``[parts, tokens, out]``; parts if one of them is."""
    if x.ndim == y.ndim == 2:
        return x + y
    return torch.cat([one if one.ndim == 3 else one.float()[None] for one in (x, y)])

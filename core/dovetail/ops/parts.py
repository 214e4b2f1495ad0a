"""Hold products whose parts, or whose addends of other ranks, are not added up yet."""

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


Addend = torch.Tensor | Parts | RankAddend
"""What a layer adds to the residual stream. Only ``RMSNorm.add_forward`` accepts the forms that are not tensors."""

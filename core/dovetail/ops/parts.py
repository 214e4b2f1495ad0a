"""Products that are not added up yet."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Parts(NamedTuple):
    """A product that was split along its inner dimension (split-K): float32 ``[parts, tokens, out]``. Who reads it adds the parts up in
    their order, which saves the programs that computed them from waiting for each other. Only products on CUDA come so."""

    addends: torch.Tensor

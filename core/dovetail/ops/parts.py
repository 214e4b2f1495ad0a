"""Hold products whose parts are not added up yet."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Parts(NamedTuple):
    """Hold a product that was split along its inner dimension (split-K): float32 ``[parts, tokens, out]``. The kernel
    that reads it adds the parts up in their order, so that the programs that computed them need not wait for each
    other. Only products on CUDA are returned in this form.
    """

    addends: torch.Tensor

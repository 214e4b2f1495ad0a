"""Let norms and gates quantize what they compute, for the linear layers that read it."""

from __future__ import annotations

from torch import nn

from dovetail.layers.linear import Linear
from dovetail.layers.norm import RMSNorm


def quantize_output(norm: nn.Module, *readers: Linear) -> None:
    """Let ``norm`` quantize its output in the form that ``readers`` multiply, if they all have the same quantizer and the
    norm is an ``RMSNorm``, unless something else selects rows of the output first (``Linear.reads_selected``). ``readers`` must
    be everything that reads the output. All of them are prepared."""
    if any(layer.reads_selected for layer in readers):
        return
    quantizers = [layer.product.quantizer for layer in readers]
    first = quantizers[0]
    if isinstance(norm, RMSNorm) and first is not None and all(one == first for one in quantizers):
        norm.quantize_with(first)

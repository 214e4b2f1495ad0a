"""Define layers of other topologies than ``dovetail.layers.decoder.DecoderLayer``. They are ``decoder.Block``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import DecoderLayer, Targets, attention_targets
from dovetail.layers.layer_norm import LayerNorm
from dovetail.layers.mlp import GatedMLP
from dovetail.layers.norm import RMSNorm
from dovetail.layers.quantized import quantize_output

if TYPE_CHECKING:
    from dovetail.layers.rotary import Rotation
    from dovetail.types import Batch


Norm = RMSNorm | LayerNorm


class SandwichNorms(NamedTuple):
    """Hold the norms of a ``SandwichLayer``, or their names in a checkpoint."""

    before_attn: Norm
    after_attn: Norm
    before_mlp: Norm
    after_mlp: Norm


class SandwichLayer(Layer):
    """Compute attention and a gated MLP, each between two norms: ``x + norm(attn(norm(x)))``, and the same with the
    MLP."""

    def __init__(self, attn: SelfAttention, mlp: GatedMLP, norms: SandwichNorms) -> None:
        super().__init__()
        self.attn_norm, self.post_attn_norm, self.mlp_norm, self.post_mlp_norm = norms
        self.attn = attn
        self.mlp = mlp

    def connect(self) -> None:
        """See ``Layer.connect``."""
        quantize_output(self.attn_norm, self.attn.qkv)
        quantize_output(self.mlp_norm, self.mlp.gate_up)

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block.enter``."""
        return self.attn_norm.add_forward(x, residual)

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block.forward``."""
        added = self.post_attn_norm.forward(self.attn.forward(x, rotation, batch, last))
        x, stream = self.mlp_norm.add_forward(added, last_rows(stream, batch, last))
        return self.post_mlp_norm.forward(self.mlp.forward(x)), stream


def last_rows(stream: torch.Tensor, batch: Batch, last: Batch | None) -> torch.Tensor:
    """Return the rows of ``stream`` that belong to ``last``, or all of them if it is None."""
    if last is None:
        return stream
    assert batch.logit_rows is not None
    return stream.index_select(0, batch.logit_rows)


class PostNormLayer(Layer):
    """Compute attention and a gated MLP, each followed by a norm and without one before: ``x + norm(attn(x))``, and the
    same with the MLP."""

    def __init__(self, attn: SelfAttention, mlp: GatedMLP, post_attn_norm: Norm, post_mlp_norm: Norm) -> None:
        super().__init__()
        self.attn = attn
        self.post_attn_norm = post_attn_norm
        self.mlp = mlp
        self.post_mlp_norm = post_mlp_norm

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block.enter``. Both results are the residual stream."""
        if residual is not None:
            x.add_(residual)
        return x, x

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block.forward``."""
        added = self.post_attn_norm.forward(self.attn.forward(x, rotation, batch, last))
        stream = added.add_(last_rows(stream, batch, last))
        return self.post_mlp_norm.forward(self.mlp.forward(stream)), stream


def norm_and_attention_targets(
    layer: DecoderLayer | SandwichLayer | PostNormLayer,
    norms: Mapping[str, str],
    checkpoint_prefix: str,
    parameter_prefix: str,
) -> Targets:
    """Yield the targets of the norms and of the attention of a layer. ``norms`` maps the names of the norms to those in the
    checkpoint."""
    for ours, theirs in norms.items():
        yield from getattr(layer, ours).targets(f"{checkpoint_prefix}.{theirs}", f"{parameter_prefix}.{ours}")
    yield from attention_targets(layer.attn, f"{checkpoint_prefix}.self_attn", f"{parameter_prefix}.attn")

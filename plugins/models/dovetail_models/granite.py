"""Define Granite 3: Llama's layers with four multipliers.

What layers add is multiplied by r. The residual stream s is kept divided by r instead, which costs nothing: with s = r t,
the norm of s is ``s / sqrt(mean(s^2) + eps)``, which is ``t / sqrt(mean(t^2) + eps / r^2)``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.layers.decoder import DecoderLayer
from dovetail.layers.norm import RMSNorm
from dovetail_models.dense import DenseModel, layer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.types import Batch
    from dovetail_models.granite_describe import GraniteSizes


class GraniteModel(DenseModel):
    """Compute ``GraniteForCausalLM``."""

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        shape = replace(layer_shape(self.info), scale=self.sizes.attention_multiplier, norm_eps=self._eps())
        return DecoderLayer(shape, index, mesh)

    def make_norm(self) -> RMSNorm:
        """See ``DecoderModel``."""
        return RMSNorm(self.info.hidden_size, self._eps())

    @property
    def sizes(self) -> GraniteSizes:
        """Return the config of the model."""
        return self.info.config

    def embed_batch(self, batch: Batch) -> torch.Tensor:
        """See ``DecoderModel``."""
        return self.embed.forward(batch.input_ids).mul_(
            self.sizes.embedding_multiplier / self.sizes.residual_multiplier
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        """See ``ModelArchitecture.forward``."""
        hidden = super().forward(batch)
        if batch.watch:
            assert batch.hidden is not None
            for layer, part in zip(batch.watch, batch.hidden.split(self.info.hidden_size, dim=1), strict=True):
                if layer != self.info.num_layers:  # the others are residual streams
                    part.mul_(self.sizes.residual_multiplier)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ``ModelArchitecture.logits``."""
        return self.head.forward(hidden).div_(self.sizes.logits_scaling)

    def _eps(self) -> float:
        return self.sizes.norm_eps / self.sizes.residual_multiplier**2

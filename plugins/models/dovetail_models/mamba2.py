"""Define Mamba-2 (arXiv 2405.21060): layers of a norm and a mixer with states, without attention and MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.layers.base import Layer
from dovetail.layers.mamba import Mamba2Mixer, Mamba2Shape
from dovetail.layers.norm import RMSNorm
from dovetail.layers.quantized import quantize_output
from dovetail.layers.states import step_states
from dovetail_models.decoder import DecoderModel
from dovetail_models.hybrid import mixer_shape

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.rotary import Rotation
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_models.decoder import Targets


class Mamba2Layer(Layer):
    """Compute a norm and a mixer. ``group`` is the cache group of states."""

    def __init__(self, shape: Mamba2Shape, state_id: int, mesh: Mesh, group: int = 0, eps: float | None = None) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps if eps is None else eps)
        self.mixer = Mamba2Mixer(shape, state_id, mesh)
        self._group = group

    def connect(self) -> None:
        """See ``Layer.connect``."""
        quantize_output(self.norm, self.mixer.project)

    def enter(self, x: Addend, residual: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Block``."""
        if residual is not None:
            return self.norm.add_forward(x, residual)
        assert isinstance(x, torch.Tensor)
        return self.norm.forward(x), x

    def forward(
        self, x: torch.Tensor, stream: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> tuple[Addend, torch.Tensor]:
        """See ``Block``."""
        rows = None if last is None else batch.logit_rows
        if rows is not None:
            stream = stream.index_select(0, rows)
        return self.mixer.parts_forward(x, step_states(batch, self._group), rows), stream


class Mamba2Model(DecoderModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``Mamba2Settings``. The residual stream has the model's
    dtype, whatever ``residual_in_fp32`` is."""

    embed_name = "backbone.embeddings"
    layers_name = "backbone.layers"
    norm_name = "backbone.norm_f"
    body = "backbone."

    def make_layer(self, index: int, mesh: Mesh) -> Mamba2Layer:
        """See ``DecoderModel``."""
        return Mamba2Layer(mixer_shape(self.info), index, mesh)

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, Mamba2Layer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.norm", f"{parameter_prefix}.norm")
        yield from layer.mixer.targets(f"{checkpoint_prefix}.mixer", f"{parameter_prefix}.mixer")

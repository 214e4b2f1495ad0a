"""Define Nemotron-H (arXiv 2504.03624) and Nemotron 3 (2512.20856): layers of one norm and a Mamba-2 mixer, attention without
positions, an MLP, or experts without a gate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import AttentionShape, SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import attention_targets, linear_targets
from dovetail.layers.expert_targets import expert_targets
from dovetail.layers.experts import Experts, Router
from dovetail.layers.linear import Linear
from dovetail.layers.mamba import Mamba2Mixer
from dovetail.layers.mlp import MLP
from dovetail.ops.parts import RankAddend
from dovetail_models.dense import layer_shape
from dovetail_models.hybrid import OnePartLayer, earlier, mixer_shape
from dovetail_models.mamba2 import Mamba2Model

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.ops.parts import Addend
    from dovetail_models.decoder import Targets
    from dovetail_models.nemotron_h_describe import NemotronHSizes


class NemotronExperts(Layer):
    """Compute experts without a gate, of inputs that may be projected to fewer channels, and an MLP beside them. The router
    reads what is not projected."""

    def __init__(self, hidden_size: int, config: NemotronHSizes, mesh: Mesh) -> None:
        super().__init__()
        assert config.experts is not None
        shape, bias = config.experts, config.mlp_bias
        self.experts, self._tp = Experts(shape, mesh), mesh.tp
        self.shared = MLP(hidden_size, config.shared_size, mesh, config.activation, bias=bias)
        self.reduce = self.restore = None
        if shape.hidden_size != hidden_size:
            self.experts.router = Router(hidden_size, shape.routing)
            self.reduce, self.restore = Linear(hidden_size, shape.hidden_size), Linear(shape.hidden_size, hidden_size)

    def parts_forward(self, x: torch.Tensor) -> Addend:
        """Map ``x [tokens, hidden_size]`` to the same shape, but leave it to ``RMSNorm.add_forward`` to add up the addends of the
        ranks."""
        routing = self.experts.router.forward(x)
        inputs = x if self.reduce is None else self.reduce.forward(x)
        added = self.experts.product.forward(inputs, routing, None)
        if self.restore is not None:
            added = self.restore.forward(added)
        added = added + self.shared.addend_forward(x)
        return added if self._tp.size == 1 else RankAddend(added, self._tp)

    def targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """Yield the targets of the layer's tensors."""
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield from expert_targets(self.experts, f"{theirs}.experts", f"{ours}.experts")
        yield from linear_targets(self.experts.router.gate, f"{theirs}.gate", f"{ours}.experts.router.gate")
        yield f"{theirs}.gate.e_score_correction_bias", WeightTarget(f"{ours}.experts.router.correction")
        yield from mlp_targets(self.shared, f"{theirs}.shared_experts", f"{ours}.shared")
        if self.reduce is not None and self.restore is not None:
            yield from linear_targets(self.reduce, f"{theirs}.fc1_latent_proj", f"{ours}.reduce")
            yield from linear_targets(self.restore, f"{theirs}.fc2_latent_proj", f"{ours}.restore")


def mlp_targets(mlp: MLP, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
    """Yield the targets of the tensors of an MLP without a gate."""
    yield from linear_targets(mlp.up, f"{checkpoint_prefix}.up_proj", f"{parameter_prefix}.up", "up")
    yield from linear_targets(mlp.down, f"{checkpoint_prefix}.down_proj", f"{parameter_prefix}.down")


class NemotronHModel(Mamba2Model):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``NemotronHSizes``."""

    def make_layer(self, index: int, mesh: Mesh) -> OnePartLayer:
        """See ``DecoderModel``."""
        info = self.info
        config: NemotronHSizes = info.config
        place, kind = earlier(config.kinds, index), config.kinds[index]
        if kind == "mamba":
            part = Mamba2Mixer(mixer_shape(info), place, mesh)
        elif kind == "attention":
            shape = layer_shape(info).attention
            assert isinstance(shape, AttentionShape)
            part = SelfAttention(shape, AttentionLayer(place, info.head_dim**-0.5), mesh)
        elif kind == "moe":
            part = NemotronExperts(info.hidden_size, config, mesh)
        else:
            part = MLP(info.hidden_size, config.intermediate_size, mesh, config.activation, bias=config.mlp_bias)
        group = sum(each.kind is not CacheGroupKind.STATE for each in info.cache_groups)
        return OnePartLayer(info.hidden_size, config.norm_eps, part, group)

    def place_layers(self) -> None:
        """See ``DecoderModel``. ``make_layer`` has placed the layers."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer, theirs, ours = self.layers[index], f"{checkpoint_prefix}.mixer", f"{parameter_prefix}.mixer"
        assert isinstance(layer, OnePartLayer)
        yield from layer.norm.targets(f"{checkpoint_prefix}.norm", f"{parameter_prefix}.norm")
        if isinstance(layer.mixer, SelfAttention):
            yield from attention_targets(layer.mixer, theirs, ours)
        elif isinstance(layer.mixer, MLP):
            yield from mlp_targets(layer.mixer, theirs, ours)
        else:
            yield from layer.mixer.targets(theirs, ours)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield from super().ignored_weights()
        if self.info.config.further:
            yield r"mtp\..+"

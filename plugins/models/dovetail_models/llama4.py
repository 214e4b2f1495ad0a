"""Define the text model of Llama 4 (Meta, April 2025): layers without rotation, queries that are scaled by their
position, norms over heads without weights, and experts whose inputs are scaled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import DecoderLayer
from dovetail.layers.expert_targets import FusedLayout, fused_expert_targets
from dovetail.layers.norm import HeadNorm
from dovetail.layers.rotary import HeadCounts, KVPlace, LayerRotary, LayerRotation, NoRotation, Rotation
from dovetail_models.moe import MoeModel

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelInfo, WeightTarget, WeightTransform
    from dovetail.layers.experts import Experts
    from dovetail_models.decoder import Targets
    from dovetail_models.llama4_describe import Llama4Sizes


class UnweightedHeadNorm(HeadNorm):
    """Compute a ``HeadNorm`` whose weights are 1. Rotation keeps the length of heads, so that it may come after the
    norm, where Llama 4 has it before."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__(num_heads, num_kv_heads, head_dim, eps)
        for name in ("q_weight", "k_weight"):
            delattr(self, name)
            self.__dict__.pop(name, None)
            self.register_buffer(name, torch.ones(head_dim), persistent=False)

    def targets(
        self, checkpoint_prefix: str, parameter_prefix: str, order: WeightTransform | None = None
    ) -> Iterator[tuple[str, WeightTarget]]:
        """Return nothing: a checkpoint has no weights of these norms."""
        return iter(())


@dataclass(frozen=True, slots=True)
class ScaledQueries(NoRotation):
    """Multiply queries by ``factors [tokens, 1, 1]``, and leave keys as they are."""

    factors: torch.Tensor

    def rotate_and_store(
        self, qkv: torch.Tensor, counts: HeadCounts, norm: HeadNorm | None, place: KVPlace
    ) -> torch.Tensor:
        """See ``Rotation.rotate_and_store``."""
        q = NoRotation.rotate_and_store(self, qkv, counts, norm, place)
        return (q * self.factors).to(q.dtype)


class TunedRotary(LayerRotary):
    """Hold the rotation of some layers; the others scale queries by their positions."""

    def __init__(self, config: Llama4Sizes) -> None:
        super().__init__(config.layer_ropes)
        self._rotates = [rope is not None for rope in config.layer_ropes]
        self._tuning, self._step = config.tuning, config.tuning_step

    def forward(self, positions: torch.Tensor) -> Rotation:
        """Return the rotation of int64 ``positions [tokens]`` for all layers."""
        factors = 1 + self._tuning * torch.log1p(torch.floor((positions.float() + 1) / self._step))
        scaled = ScaledQueries(factors[:, None, None])
        rotary = self._kinds[0].forward(positions) if self._kinds else scaled
        return LayerRotation(tuple([rotary if rotates else scaled for rotates in self._rotates]))


class Llama4Model(MoeModel):
    """Compute the model of a ``ModelInfo`` whose ``config`` is a ``Llama4Sizes``."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        if info.config.multimodal:
            self.embed_name = "language_model.model.embed_tokens"
            self.layers_name = "language_model.model.layers"
            self.norm_name = "language_model.model.norm"
            self.head_name = "language_model.lm_head"
        super().__init__(info, mesh)

    def make_layer(self, index: int, mesh: Mesh) -> DecoderLayer:
        """See ``DecoderModel``."""
        layer, config = super().make_layer(index, mesh), self.info.config
        assert isinstance(layer, DecoderLayer)
        if config.unweighted_norm and config.layer_ropes[index] is not None:
            assert isinstance(layer.attn, SelfAttention)
            layer.attn.qk_norm = UnweightedHeadNorm(*layer.attn.counts, self.info.head_dim, config.norm_eps)
        return layer

    def make_rotary(self) -> LayerRotary:
        """See ``DecoderModel``."""
        config: Llama4Sizes = self.info.config
        return TunedRotary(config) if config.tuning else LayerRotary(config.layer_ropes)

    def experts_targets(self, layer: Experts, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``MoeModel``."""
        yield from self.router_targets(layer, checkpoint_prefix, f"{parameter_prefix}.router")
        yield from self.shared_targets(layer, checkpoint_prefix, parameter_prefix)
        layout = FusedLayout(transposed=True)
        yield from fused_expert_targets(layer, f"{checkpoint_prefix}.experts", parameter_prefix, layout)

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield from super().ignored_weights()
        if self.info.config.multimodal:
            yield r"vision_model\..+"
            yield r"multi_modal_projector\..+"

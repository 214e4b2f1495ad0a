"""Define Qwen, the first generation (Bai et al. 2023, arXiv 2309.16609): the layers of Qwen2, with other names and with q,
k and v in one tensor of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import DecoderLayer, linear_targets
from dovetail.layers.mlp import GatedMLP
from dovetail_models.dense import DenseModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class QwenModel(DenseModel):
    """Compute ``QWenLMHeadModel``."""

    body = "transformer."
    embed_name = "transformer.wte"
    layers_name = "transformer.h"
    norm_name = "transformer.ln_f"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        assert isinstance(layer.attn, SelfAttention)
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield f"{theirs}.ln_1.weight", WeightTarget(f"{ours}.attn_norm.weight")
        yield f"{theirs}.ln_2.weight", WeightTarget(f"{ours}.mlp_norm.weight")
        for field in ("weight", "bias"):
            yield f"{theirs}.attn.c_attn.{field}", layer.attn.qkv.fused_targets(f"{ours}.attn.qkv.{field}")
        yield from linear_targets(layer.attn.out, f"{theirs}.attn.c_proj", f"{ours}.attn.out")
        yield from linear_targets(mlp.gate_up, f"{theirs}.mlp.w1", f"{ours}.mlp.gate_up", "up")
        yield from linear_targets(mlp.gate_up, f"{theirs}.mlp.w2", f"{ours}.mlp.gate_up", "gate")
        yield from linear_targets(mlp.down, f"{theirs}.mlp.c_proj", f"{ours}.mlp.down")

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        yield r"transformer\.rotary_emb\.inv_freq"
        yield from super().ignored_weights()

"""Define Phi-3 (Abdin et al. 2024, arXiv 2404.14219) and Phi-4: Llama's layers, of which a checkpoint has q, k and v in
one tensor and gate and up in another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.interfaces.model import WeightTarget
from dovetail.layers.attention import SelfAttention
from dovetail.layers.decoder import DecoderLayer, linear_targets
from dovetail.layers.mlp import GatedMLP
from dovetail_models.dense import DenseModel

if TYPE_CHECKING:
    from dovetail_models.decoder import Targets


class Phi3Model(DenseModel):
    """Compute ``Phi3ForCausalLM``."""

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layers[index]
        assert isinstance(layer, DecoderLayer)
        mlp = layer.mlp
        assert isinstance(mlp, GatedMLP)
        assert isinstance(layer.attn, SelfAttention)
        theirs, ours = checkpoint_prefix, parameter_prefix
        yield f"{theirs}.input_layernorm.weight", WeightTarget(f"{ours}.attn_norm.weight")
        yield f"{theirs}.post_attention_layernorm.weight", WeightTarget(f"{ours}.mlp_norm.weight")
        yield f"{theirs}.self_attn.qkv_proj.weight", layer.attn.qkv.fused_targets(f"{ours}.attn.qkv.weight")
        yield from linear_targets(layer.attn.out, f"{theirs}.self_attn.o_proj", f"{ours}.attn.out")
        yield f"{theirs}.mlp.gate_up_proj.weight", mlp.gate_up.fused_targets(f"{ours}.mlp.gate_up.weight")
        yield from linear_targets(mlp.down, f"{theirs}.mlp.down_proj", f"{ours}.mlp.down")

"""Define GPT-NeoX (Black et al. 2022, arXiv 2204.06745; Pythia, arXiv 2304.01373): attention and MLP of one residual
stream, a rotation of a part of each head, and q, k and v of each head side by side in the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.layers.decoder import linear_targets
from dovetail_models.plain_layers import PlainModel

if TYPE_CHECKING:
    from dovetail.layers.attention import SelfAttention
    from dovetail.layers.transforms import SplitHalves
    from dovetail_models.decoder import Targets


@dataclass(frozen=True, slots=True)
class HeadsApart(WeightTransform):
    """Read ``[heads, (q, k, v), head_dim]`` into all queries, all keys and all values. ``order`` changes the elements of
    each head of queries and keys."""

    head_dim: int
    order: SplitHalves | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        q, k, v = (part.flatten(0, 1) for part in tensor.unflatten(0, (-1, 3, self.head_dim)).unbind(1))
        if self.order is not None:
            q, k = (self.order.apply(part, tuple(part.shape)) for part in (q, k))
        return torch.cat((q, k, v))


class GPTNeoXModel(PlainModel):
    """Compute ``GPTNeoXForCausalLM``."""

    body = "gpt_neox."
    embed_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    norm_name = "gpt_neox.final_layer_norm"
    head_name = "embed_out"

    def layer_targets(self, index: int, checkpoint_prefix: str, parameter_prefix: str) -> Targets:
        """See ``DecoderModel``."""
        layer = self.layer(index)
        theirs, ours = checkpoint_prefix, parameter_prefix
        assert layer.mlp_norm is not None
        yield from layer.attn_norm.targets(f"{theirs}.input_layernorm", f"{ours}.attn_norm")
        yield from layer.mlp_norm.targets(f"{theirs}.post_attention_layernorm", f"{ours}.mlp_norm")
        yield from _qkv_targets(
            layer.attn, self.info.head_dim, f"{theirs}.attention.query_key_value", f"{ours}.attn.qkv"
        )
        yield from linear_targets(layer.attn.out, f"{theirs}.attention.dense", f"{ours}.attn.out")
        yield from linear_targets(layer.mlp.up, f"{theirs}.mlp.dense_h_to_4h", f"{ours}.mlp.up", "up")
        yield from linear_targets(layer.mlp.down, f"{theirs}.mlp.dense_4h_to_h", f"{ours}.mlp.down")

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``. These are buffers of the first versions."""
        yield r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)"
        yield from super().ignored_weights()


def _qkv_targets(attn: SelfAttention, head_dim: int, theirs: str, ours: str) -> Targets:
    """Yield the targets of the projections of all heads. A rank reads its own heads, which are adjacent."""
    transform = HeadsApart(head_dim, attn.order)
    for field in ("weight", "bias"):
        if getattr(attn.qkv, field) is not None:
            name = f"{ours}.{field}"
            own = attn.qkv.target(name, "q").shares
            shares = tuple(TensorShare(0, 3 * one.start, 3 * one.size, 3 * one.whole) for one in own)
            yield f"{theirs}.{field}", WeightTarget(name, shares=shares, transform=transform)

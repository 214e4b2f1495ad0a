"""Define the model of a DFlash drafter (arXiv 2602.06036): Qwen3's layers over two kinds of keys and values.

For the text before the block, keys and values are computed from outputs of the target's layers (the context). For the
block they are computed from the block's tokens, which all see each other unless the drafter is causal. The embeddings
and the head are the target's, or the drafter's own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.model import ModelArchitecture, ModelInfo, WeightTarget
from dovetail.layers.attention import SelfAttention
from dovetail.layers.base import Layer
from dovetail.layers.decoder import DecoderLayer, decoder_targets
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import Linear
from dovetail.layers.norm import HeadNorm, RMSNorm
from dovetail.layers.rotary import HeadCounts, KVPlace, Rotary
from dovetail_speculative.speculators import NO_PARAMETERS

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch
    from dovetail_speculative.dflash_checkpoint import DFlashShape


class DFlashModel(Layer, ModelArchitecture):
    """Run the model of a ``ModelInfo`` whose ``config`` is a ``DFlashShape``, for a ``target``."""

    def __init__(self, info: ModelInfo, mesh: Mesh, target: ModelArchitecture) -> None:
        super().__init__()
        shape: DFlashShape = info.config
        self.info = info
        hidden, eps = info.hidden_size, shape.decoder.norm_eps
        self.fc = Linear(len(shape.layer_ids) * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(
            DecoderLayer(shape.decoder, index, mesh, window) for index, window in enumerate(shape.windows)
        )
        self.norm = RMSNorm(hidden, eps)
        self.rotary = Rotary(shape.rope)
        self._layers: tuple[DecoderLayer, ...] = tuple(self.layers)  # pyright: ignore[reportAttributeAccessIssue]
        self.embed = Embedding(info.vocab_size, hidden, mesh) if shape.own_embedding else None
        self.head = None if shape.draft_vocab is None else LMHead(hidden, shape.draft_vocab, mesh)
        self._embed = target.embed_tokens if self.embed is None else self.embed.forward
        self._logits = target.logits if self.head is None else self.head.forward
        self._context: Linear
        self._key_norms: list[HeadNorm]
        self._counts: HeadCounts

    def prepare(self) -> None:
        """Join the weights that compute keys and values of the context into one product for all layers. See
        ``Layer.prepare``."""
        attention = [layer.attn for layer in self._layers if isinstance(layer.attn, SelfAttention)]
        self._counts = attention[0].counts
        queries = self._counts.queries * self.info.head_dim
        context = Linear(self.info.hidden_size, 0, bias=attention[0].qkv.bias is not None)
        context.weight = _joined([attn.qkv.dense_weight()[queries:] for attn in attention])
        if context.bias is not None:
            context.bias = _joined([attn.qkv.bias[queries:] for attn in attention if attn.qkv.bias is not None])
        norms = [attn.qk_norm for attn in attention if attn.qk_norm is not None]
        of_keys = [HeadNorm(0, self._counts.keys, self.info.head_dim, norm.eps) for norm in norms]
        for ours, norm in zip(of_keys, norms, strict=True):
            ours.q_weight, ours.k_weight = norm.q_weight, norm.k_weight
        self._key_norms = of_keys
        object.__setattr__(self, "_context", context)  # not a submodule: its parameters are not in the checkpoint
        super().prepare()

    def store_context(self, batch: Batch, features: torch.Tensor) -> None:
        """Write the keys and values of tokens of the text, from ``features [tokens, watched layers * hidden_size]`` of
        the target. With ``batch.own``, write those of this rank's rows only."""
        if batch.own is not None:
            if batch.own.batch is not None:
                self.store_context(batch.own.batch, features.index_select(0, batch.own.tokens))
            return
        if not self.prepared:
            self.prepare()
        context = self.hidden_norm.forward(self.fc.forward(features))
        heads, size = self._counts.keys, self.info.head_dim
        kv = self._context.forward(context).view(len(context), -1, 2 * heads, size)
        rotation = self.rotary.forward(batch.positions)
        for index, norm in enumerate(self._key_norms):
            place = KVPlace(batch.kv[0], index, batch.out_loc)
            rotation.rotate_and_store(kv[:, index], HeadCounts(0, heads), norm, place)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Run the model over blocks. See ``ModelArchitecture.forward``."""
        x: Addend = self._embed(batch.input_ids)
        residual = None
        rotation = self.rotary.forward(batch.own_positions)
        for layer in self._layers:
            x, residual = layer.forward(*layer.enter(x, residual), rotation, batch)
        assert residual is not None
        return self.norm.add_forward(x, residual)[0]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits over the target's vocabulary, or over ``draft_vocab``. See ``ModelArchitecture.logits``."""
        return self._logits(hidden)

    def weights_map(self) -> Mapping[str, WeightTarget | list[WeightTarget]]:
        """See ``ModelArchitecture.weights_map``."""
        names = ("fc.weight", "hidden_norm.weight", "norm.weight")
        targets: dict[str, WeightTarget | list[WeightTarget]] = {name: WeightTarget(name) for name in names}
        if self.embed is not None:
            targets["embed_tokens.weight"] = self.embed.target("embed.weight")
        if self.head is not None:
            targets["lm_head.weight"] = self.head.target("head.weight")
        for index, layer in enumerate(self._layers):
            targets.update(decoder_targets(layer, f"layers.{index}", f"layers.{index}"))
        return targets

    def ignored_weights(self) -> Iterable[str]:
        """See ``ModelArchitecture.ignored_weights``."""
        return NO_PARAMETERS


def _joined(parts: list[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.cat(parts), requires_grad=False)

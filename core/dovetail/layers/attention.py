"""Compute self-attention over the paged KV pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform
from dovetail.layers.base import Layer
from dovetail.layers.linear import NO_TRANSFORMS, ColumnLinear, row_linear
from dovetail.layers.norm import HeadNorm
from dovetail.layers.projection_norm import NormedProjections
from dovetail.layers.rotary import HeadCounts, KVPlace
from dovetail.layers.transforms import Chain, HeadPart
from dovetail.ops.activation import sigmoid_mul

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.layers.rotary import Rotation
    from dovetail.layers.transforms import SplitHalves
    from dovetail.ops.parts import Addend
    from dovetail.types import Batch


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Describe the sizes and variants of a whole self-attention layer. If ``qk_norm_eps`` is set, each query and key head is
    normalised, or, with ``qk_norm_across_heads``, all queries of a token together, and all its keys
    (``NormedProjections``). ``input_size`` is the size of the layer's input if it is not ``hidden_size``. With ``sinks``, each query
    head has a learned attention sink (see ``AttentionLayer``). ``order`` is the order in which a checkpoint has the
    elements of a query or key head, if it is not the order in which ``Rotary`` rotates: with a partial rotation
    ``SplitHalves(head_dim, rope.rotary_dim)``. For ``norm_plus_one`` see ``RMSNorm``. With ``gated``, what a query
    head returns is multiplied by the sigmoid of a gate, a projection of the layer's input that checkpoints have beside
    the query of each head."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    input_size: int | None = None
    sinks: bool = False
    order: SplitHalves | None = None
    qk_norm_across_heads: bool = False
    norm_plus_one: bool = False
    gated: bool = False


class SelfAttention(Layer):
    """Project the input to q, k and v, rotate q and k, store k and v in the pool, attend, and project back.

    Its parameters are ``qkv`` (one for the three projections), ``out``, with a norm ``qk_norm``, and with sinks
    ``sinks`` (float32, whatever the model's dtype). Every rank computes its share of the heads, ``counts``, and has
    their sinks. If there are fewer KV heads than ranks, several ranks compute the same one. ``group`` is the cache
    group that contains the layer, ``constants.layer_id`` its index in the group's pool. With ``divides_rows``, it computes the tokens
    of ``Batch.own`` only.
    """

    def __init__(self, shape: AttentionShape, constants: AttentionLayer, mesh: Mesh, group: int = 0) -> None:
        super().__init__()
        self.divides_rows, mesh = mesh.attention == "data", mesh.of_attention
        head_dim = shape.head_dim
        queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
        widths = {"q": queries, "k": keys, "v": keys}
        inputs = shape.input_size or shape.hidden_size
        order: Mapping[str, WeightTransform] = dict.fromkeys("qk", shape.order) if shape.order else NO_TRANSFORMS
        if shape.gated:
            widths["gate"] = queries
            order = {**order, **_gated_transforms(shape)}
        eps, bias = shape.qk_norm_eps, shape.qkv_bias
        if shape.qk_norm_across_heads:
            assert eps is not None
            self.qkv = NormedProjections(inputs, widths, mesh, eps, bias=bias, unit=head_dim, transforms=order)
        else:
            self.qkv = ColumnLinear(inputs, widths, mesh, bias=bias, unit=head_dim, transforms=order)
        self.qkv.reads_selected = self.divides_rows
        self.out = row_linear(queries, shape.hidden_size, mesh, bias=shape.out_bias)
        first, heads = mesh.tp.share(shape.num_heads)
        kv_heads = mesh.tp.share(shape.num_kv_heads)[1]
        norm = None
        if eps is not None and not shape.qk_norm_across_heads:
            norm = HeadNorm(heads, kv_heads, head_dim, eps, plus_one=shape.norm_plus_one)
        self.qk_norm = norm
        self.order = shape.order
        self.sinks = None
        self._sinks_share: tuple[TensorShare, ...] = ()
        if shape.sinks:
            self.sinks = nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False)
            constants = replace(constants, sinks=self.sinks)
            self._sinks_share = (TensorShare(0, first, heads, shape.num_heads),) if mesh.tp.size > 1 else ()
        self.constants = constants
        self.group = group
        self.counts = HeadCounts(heads, kv_heads)
        self._heads = (heads + 2 * kv_heads, head_dim)
        self._out_width = heads * head_dim
        self.gated = shape.gated

    def set_place(self, group: int, layer_id: int) -> None:
        """Set the cache group that contains the layer, and the layer's index in the group's pool."""
        self.group, self.constants = group, replace(self.constants, layer_id=layer_id)

    def forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor:
        """Map ``x [tokens, input_size]`` to ``[tokens, hidden_size]``. Writes K and V of the step to the pool. With
        ``last``, only the tokens ``batch.logit_rows`` attend, as the rows of ``last``, and the result is ``[rows of
        last, hidden_size]``. With ``batch.own``, which excludes ``last``, this rank attends in its own rows only.
        """
        if batch.own is not None:
            return batch.own.sum_over_ranks(self, x, rotation)
        return self.out.forward(self.attend(x, rotation, batch, last))

    def parts_forward(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> Addend:
        """Compute ``forward``, but leave it to ``RMSNorm.add_forward`` to add up parts (see
        ``Linear.parts_forward``)."""
        if batch.own is not None:
            return batch.own.addend(self, x, rotation)
        return self.out.parts_forward(self.attend(x, rotation, batch, last))

    def sinks_target(self, parameter: str) -> WeightTarget:
        """Return where the checkpoint's sinks of all heads go. ``parameter`` is the full name of ``sinks`` in the
        model."""
        return WeightTarget(parameter, shares=self._sinks_share)

    def query_targets(self, parameter: str) -> WeightTarget | list[WeightTarget]:
        """Return where the checkpoint's projection of queries goes, and with ``gated`` their gates. ``parameter`` is the
        full name of the weight or bias of ``qkv`` in the model."""
        query = self.qkv.target(parameter, "q")
        if not self.gated:
            return query
        found = (query, self.qkv.target(parameter, "gate"))
        return [each._replace(shares=tuple(_doubled(share) for share in each.shares)) for each in found]

    def attend(self, x: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None) -> torch.Tensor:
        """Return the attended values, which are the input of the output projection."""
        return self.attend_projected(self.qkv.forward(x), rotation, batch, last)

    def attend_projected(
        self, projected: torch.Tensor, rotation: Rotation, batch: Batch, last: Batch | None = None
    ) -> torch.Tensor:
        """Compute ``attend`` from what ``qkv`` returns."""
        tokens, gate = projected.shape[0], None
        heads, head_dim = self._heads
        if self.gated:
            projected, gate = projected.split((heads * head_dim, self._out_width), 1)
        qkv = projected.view(tokens, heads, head_dim)
        constants, group = self.constants, self.group
        own = batch.view(group) if group else batch
        place = KVPlace(batch.kv[group], constants.layer_id, own.out_loc)
        attended = None
        if tokens == len(batch.slots) and last is None:
            rows = rotation.projected(qkv, self.qk_norm, place)
            attended = None if rows is None else batch.attn[group].forward_projected(rows, constants, own)
        if attended is not None:
            attended = attended.reshape(tokens, self._out_width)
            return attended if gate is None else sigmoid_mul(attended, gate)
        q = rotation.rotate_and_store(qkv, self.counts, self.qk_norm, place)
        if last is not None:
            assert batch.logit_rows is not None
            gate = None if gate is None else gate.index_select(0, batch.logit_rows)
            q, batch, own = q.index_select(0, batch.logit_rows), last, last.view(group)
        attended = batch.attn[group].forward(q, constants, own) if len(q) else q
        attended = attended.reshape(len(q), self._out_width)
        return attended if gate is None else sigmoid_mul(attended, gate)


def _gated_transforms(shape: AttentionShape) -> dict[str, WeightTransform]:
    """Return what reads queries and gates from the projection that has both for each head."""
    query, gate = (HeadPart(shape.head_dim, index) for index in range(2))
    return {"q": Chain((query, shape.order)) if shape.order else query, "gate": gate}


def _doubled(share: TensorShare) -> TensorShare:
    """Return the share of a tensor with gates beside the queries."""
    return TensorShare(share.dim, 2 * share.start, 2 * share.size, 2 * share.whole)

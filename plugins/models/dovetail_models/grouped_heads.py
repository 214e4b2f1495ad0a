"""Read q, k and v of checkpoints that store them group by group: the queries of a group, its key and its value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import TensorShare, WeightTarget, WeightTransform

if TYPE_CHECKING:
    from dovetail.layers.attention import SelfAttention
    from dovetail.layers.transforms import SplitHalves
    from dovetail_models.decoder import Targets


@dataclass(frozen=True, slots=True)
class GroupsApart(WeightTransform):
    """Read ``[groups, queries + 2, head_dim]`` into all queries, all keys and all values. ``order`` changes the elements
    of each head of queries and keys."""

    queries: int
    head_dim: int
    order: SplitHalves | None

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        groups = tensor.unflatten(0, (-1, self.queries + 2, self.head_dim))
        q, k, v = (part.flatten(0, 2) for part in groups.split((self.queries, 1, 1), 1))
        if self.order is not None:
            q, k = (self.order.apply(part, tuple(part.shape)) for part in (q, k))
        return torch.cat((q, k, v))


def grouped_targets(attn: SelfAttention, head_dim: int, theirs: str, ours: str) -> Targets:
    """Yield the targets of the fused projections of ``attn``, whose groups are those of its KV heads. A rank reads its
    own groups, which are adjacent, or its queries, its key and its value of one group."""
    for field in ("weight", "bias"):
        if getattr(attn.qkv, field) is not None:
            yield f"{theirs}.{field}", _grouped(attn, head_dim, f"{ours}.{field}")


def _grouped(attn: SelfAttention, head_dim: int, name: str) -> list[WeightTarget]:
    own = {part: attn.qkv.target(name, part) for part in ("q", "k", "v")}
    heads, kv_heads = attn.counts
    if not own["k"].shares:
        return [WeightTarget(name, transform=GroupsApart(heads // kv_heads, head_dim, attn.order))]
    (q,), (k,) = own["q"].shares, own["k"].shares
    queries = q.whole // k.whole
    width = (queries + 2) * head_dim  # rows of a group
    group, whole = k.start // head_dim, k.whole // head_dim * width
    if heads == kv_heads * queries:  # whole groups
        transform = GroupsApart(queries, head_dim, attn.order)
        return [
            WeightTarget(name, shares=(TensorShare(0, group * width, kv_heads * width, whole),), transform=transform)
        ]
    first = group * width
    starts = {"q": first + q.start - group * queries * head_dim, "k": first + queries * head_dim}
    starts["v"] = starts["k"] + head_dim
    return [
        target._replace(shares=(TensorShare(0, starts[part], target.size or 0, whole),)) for part, target in own.items()
    ]

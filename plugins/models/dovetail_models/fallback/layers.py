"""Take the place of torch's linear layers and embeddings in modules of transformers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from dovetail.interfaces.mesh import Mesh
from dovetail.interfaces.model import WeightTarget
from dovetail.layers.base import Layer
from dovetail.layers.embedding import Embedding, LMHead
from dovetail.layers.linear import ColumnLinear, Linear, row_linear
from dovetail.layers.transforms import transposed
from dovetail_models.fallback.facts import AttentionFacts
from dovetail_models.fallback.plan import (
    COLUMN,
    COLUMN_GATHERED,
    COLUMN_PACKED,
    ROW,
    ROW_SPLIT,
    attention_of,
    unit_of,
)

Targets = Iterator[tuple[str, WeightTarget | list[WeightTarget]]]
"""Yield the names of a module's parameters in transformers, without that of the module, and the targets of their tensors."""


class Replacement(Layer, ABC):
    """Take the place of a module of transformers."""

    @abstractmethod
    def targets(self, path: str) -> Targets:
        """Yield the targets of the module's parameters. ``path`` is the name of this layer in the model."""


class Projection(Replacement):
    """Compute a linear layer for inputs of any number of dimensions, ``[..., in]``."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ``x [..., in]`` to ``[..., out]``."""
        y = self.linear.forward(x.reshape(-1, x.shape[-1]).contiguous())
        return y.view(*x.shape[:-1], y.shape[-1])

    def targets(self, path: str) -> Targets:
        """See ``Replacement``."""
        for field in ("weight", "bias"):
            if field == "weight" or self.linear.bias is not None:
                yield field, self.target(f"{path}.linear.{field}")

    def target(self, parameter: str) -> WeightTarget | list[WeightTarget]:
        """Return the target of a weight or bias."""
        return self.linear.target(parameter)


class TransposedProjection(Projection):
    """Compute a linear layer whose weight checkpoints have as ``[in, out]``."""

    def target(self, parameter: str) -> WeightTarget | list[WeightTarget]:
        """See ``Projection``."""
        target = self.linear.target(parameter)
        return transposed(target)


class HeadProjection(Projection):
    """Compute the logits of hidden states."""

    def targets(self, path: str) -> Targets:
        """See ``Projection``. A head that is tied to the embedding has no weight of its own."""
        head = self.linear
        assert isinstance(head, LMHead)
        yield from (found for found in super().targets(path) if not (head.tied and found[0] == "weight"))


class ColumnProjection(Projection):
    """Compute this rank's share of the outputs, or of the outputs of each of ``parts`` equal projections."""

    def __init__(self, linear: nn.Linear, mesh: Mesh, unit: int, parts: int = 1) -> None:
        widths = {str(part): linear.out_features // parts for part in range(parts)}
        super().__init__(ColumnLinear(linear.in_features, widths, mesh, bias=linear.bias is not None, unit=unit))

    def target(self, parameter: str) -> list[WeightTarget]:
        """See ``Projection``."""
        assert isinstance(self.linear, ColumnLinear)
        return self.linear.fused_targets(parameter)


class GatheredProjection(ColumnProjection):
    """Compute a share of the outputs, and gather those of all ranks."""

    def __init__(self, linear: nn.Linear, mesh: Mesh) -> None:
        super().__init__(linear, mesh, unit=1)
        self._tp, self._width = mesh.tp, linear.out_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Projection``."""
        own = self.linear.forward(x.reshape(-1, x.shape[-1]).contiguous())
        return self._tp.all_gather(own, self._width).view(*x.shape[:-1], self._width)


class SplitProjection(Projection):
    """Take this rank's share of whole inputs, and add up over the ranks."""

    def __init__(self, linear: nn.Linear, mesh: Mesh) -> None:
        super().__init__(row_linear(linear.in_features, linear.out_features, mesh, bias=linear.bias is not None))
        self._start, self._size = mesh.tp.share(linear.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Projection``."""
        return super().forward(x.narrow(-1, self._start, self._size))


class TokenEmbedding(Replacement):
    """Look up embeddings for ids of any number of dimensions, and multiply them by ``scale`` if it is not 1."""

    def __init__(self, embedding: Embedding, scale: float) -> None:
        super().__init__()
        self.embedding, self._scale = embedding, scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ``input_ids [...]`` to ``[..., hidden_size]``."""
        found = self.embedding.forward(input_ids.reshape(-1))
        if self._scale != 1:
            found.mul_(self._scale)
        return found.view(*input_ids.shape, -1)

    def targets(self, path: str) -> Targets:
        """See ``Replacement``."""
        yield "weight", self.embedding.target(f"{path}.embedding.weight")


def new_projection(
    name: str, linear: nn.Linear, plan: Mapping[str, str], attention: Sequence[AttentionFacts], mesh: Mesh
) -> Projection:
    """Return this rank's share of the linear layer ``name``, divided as ``plan`` says."""
    style = plan.get(name) if mesh.tp.size > 1 else None
    bias = linear.bias is not None
    if style == COLUMN:
        return ColumnProjection(linear, mesh, unit_of(linear.out_features, attention_of(name, attention)))
    if style == COLUMN_PACKED:
        return ColumnProjection(linear, mesh, 1, parts=2)
    if style == COLUMN_GATHERED:
        return GatheredProjection(linear, mesh)
    if style == ROW_SPLIT:
        return SplitProjection(linear, mesh)
    if style == ROW:
        return Projection(row_linear(linear.in_features, linear.out_features, mesh, bias=bias))
    return Projection(Linear(linear.in_features, linear.out_features, bias=bias))

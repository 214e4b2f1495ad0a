"""Compute the projections of attention with RMSNorm over all queries and over all keys of a token (OLMo 2, OLMoE,
MiniMax-M2), in place of a norm of each head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from dovetail.interfaces.model import WeightTarget, WeightTransform
from dovetail.layers.base import parameter
from dovetail.layers.linear import NO_TRANSFORMS, ColumnLinear
from dovetail.ops.norm import rms_norm

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.quantization import LinearInput


class NormedProjections(ColumnLinear):
    """Compute the projections ``q``, ``k`` and ``v`` of one input, and normalise all queries of a token together, and
    all its keys. If the heads are divided among ranks, these add up the squares of their shares."""

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        mesh: Mesh,
        eps: float,
        *,
        bias: bool = False,
        unit: int = 1,
        transforms: Mapping[str, WeightTransform] = NO_TRANSFORMS,
    ) -> None:
        super().__init__(in_features, parts, mesh, bias=bias, unit=unit, transforms=transforms)
        sizes = [unit * mesh.tp.share(parts[name] // unit)[1] for name in ("q", "k", "v")]
        self.q_norm, self.k_norm = parameter(sizes[0]), parameter(sizes[1])
        self.eps = eps
        self._tp = mesh.tp
        self._sizes = sizes
        # ranks that hold the same key head all count its squares, and all key heads equally often
        self._counted = [size * mesh.tp.size for size in sizes[:2]]

    def forward(self, x: LinearInput) -> torch.Tensor:
        """Map contiguous ``x [tokens, in]`` to ``[tokens, out]``. Mutates nothing."""
        q, k, v = super().forward(x).split(self._sizes, 1)
        if self._tp.size == 1:
            return torch.cat((rms_norm(q, self.q_norm, self.eps), rms_norm(k, self.k_norm, self.eps), v), 1)
        squares = torch.stack(
            [part.float().square().sum(1) / n for part, n in zip((q, k), self._counted, strict=True)], 1
        )
        factors = (self._tp.all_reduce(squares) + self.eps).rsqrt()
        q = (q * factors[:, :1]).to(x.dtype) * self.q_norm
        k = (k * factors[:, 1:]).to(x.dtype) * self.k_norm
        return torch.cat((q, k, v), 1)

    def norm_targets(self, checkpoint_prefix: str, parameter_prefix: str) -> Iterator[tuple[str, WeightTarget]]:
        """Yield the targets of the weights of the norms, such as ``{checkpoint_prefix}.q_norm.weight``.
        ``parameter_prefix`` is the name of this layer in the model."""
        for part in ("q", "k"):
            _, _, shares, transform = self._places[part]
            name = f"{parameter_prefix}.{part}_norm"
            yield f"{checkpoint_prefix}.{part}_norm.weight", WeightTarget(name, None, None, shares, transform)

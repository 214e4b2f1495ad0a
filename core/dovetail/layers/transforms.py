"""Define what changes the tensors of a checkpoint before they fill parameters (``WeightTarget.transform``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces.model import WeightTransform


@dataclass(frozen=True, slots=True)
class Reshape(WeightTransform):
    """Read a tensor of shape ``source`` in the order of its elements. The fused parameter ``[experts * rows, columns]``
    of all experts is read from ``[experts, rows, columns]``."""

    source: tuple[int, ...]

    @property
    def reorders(self) -> bool:
        """See ``WeightTransform``."""
        return False

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return self.source

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.reshape(shape)


@dataclass(frozen=True, slots=True)
class Transpose(WeightTransform):
    """Read a matrix ``[in, out]``, as the checkpoints of GPT-2 have it, into a parameter ``[out, in]``."""

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        rows, columns = shape
        return columns, rows

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.T


@dataclass(frozen=True, slots=True)
class AddOne(WeightTransform):
    """Read the weight ``w`` of a norm that multiplies by ``1 + w`` (Gemma). The sum is computed in float32."""

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.float() + 1


@dataclass(frozen=True, slots=True)
class SplitHalves(WeightTransform):
    """Read the projection of queries or keys of a model that rotates the first ``rotary_dim`` elements of each head, the
    pairs (i, i + rotary_dim / 2), into the order in which ``Rotary`` rotates: the pairs (i, i + head_dim / 2), of which
    those that are not rotated are the last. With ``pairs``, the model rotates the pairs (0, 1), (2, 3) and so on.

    The products of queries and keys stay the same, because both are in the same order.
    """

    head_dim: int
    rotary_dim: int
    pairs: bool = False

    @property
    def orders_rows(self) -> bool:
        """See ``WeightTransform``."""
        return True

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        heads = tensor.unflatten(0, (-1, self.head_dim))
        return heads.index_select(1, self.order.to(tensor.device)).flatten(0, 1)

    @property
    def order(self) -> torch.Tensor:
        """Return int64 ``[head_dim]``: the element of a head in the checkpoint that each element comes from."""
        head = torch.arange(self.head_dim, device="cpu")
        rotated, rest = head.split((self.rotary_dim, self.head_dim - self.rotary_dim))
        low, high = (rotated[0::2], rotated[1::2]) if self.pairs else rotated.chunk(2)
        return torch.cat((low, rest[: len(rest) // 2], high, rest[len(rest) // 2 :]))

"""Define what changes the tensors of a checkpoint before they fill parameters (``WeightTarget.transform``)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dovetail.interfaces.model import WeightTarget, WeightTransform


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


def transposed(target: WeightTarget) -> WeightTarget:
    """Return the target of a checkpoint that has a weight ``[in, out]``: what ``target`` reads of the rows of ``[out, in]`` it
    reads of the columns, and the other way round. The target of a bias is returned as it is."""
    if not target.parameter.endswith("weight"):
        return target
    shares = tuple(share._replace(dim=1 - share.dim) for share in target.shares)
    return target._replace(shares=shares, transform=Transpose())


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


@dataclass(frozen=True, slots=True)
class HeadPart(WeightTransform):
    """Read part ``index`` of ``parts`` equal parts of every head, such as the query or the gate of a projection that has both
    for each head. The parameter has heads of ``size``."""

    size: int
    index: int
    parts: int = 2

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return True

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        return (shape[0] * self.parts, *shape[1:])

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        return tensor.unflatten(0, (-1, self.parts, self.size))[:, self.index].reshape(shape)


@dataclass(frozen=True, slots=True)
class PartsTogether(WeightTransform):
    """Read a projection whose rows are grouped by heads, each with parts of ``sizes``, into a parameter in which the rows
    of the first part of all heads precede those of the second, and so on."""

    sizes: tuple[int, ...]

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
        parts = tensor.unflatten(0, (-1, sum(self.sizes))).split(self.sizes, 1)
        return torch.cat([part.flatten(0, 1) for part in parts])


@dataclass(frozen=True, slots=True)
class Chain(WeightTransform):
    """Apply several transforms, the first one to what is read."""

    transforms: tuple[WeightTransform, ...]

    @property
    def orders_rows(self) -> bool:
        """See ``WeightTransform``."""
        return all(each.orders_rows for each in self.transforms)

    @property
    def keeps_dtype(self) -> bool:
        """See ``WeightTransform``."""
        return all(each.keeps_dtype for each in self.transforms)

    def source_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """See ``WeightTransform``."""
        for each in reversed(self.transforms):
            shape = each.source_shape(shape)
        return shape

    def apply(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """See ``WeightTransform``."""
        for index, each in enumerate(self.transforms):
            tensor = each.apply(tensor, Chain(self.transforms[index + 1 :]).source_shape(shape))
        return tensor

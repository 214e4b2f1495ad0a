"""Undo the changes that llama.cpp's converter makes to tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


class Change(ABC):
    """Make the tensor of a checkpoint of one tensor, or of several, of a GGUF file. Instances are immutable.

    If ``keeps_rows``, rows stay whole, so that ``apply`` also works on rows of blocks. ``expects`` describes for errors the
    shapes that ``fits`` accepts.
    """

    keeps_rows = False
    expects = "one tensor"

    def fits(self, *shapes: Shape) -> bool:
        """Return whether ``shape`` and ``apply`` accept tensors of these shapes."""
        return len(shapes) == 1

    @abstractmethod
    def shape(self, *shapes: Shape) -> Shape:
        """Return the shape of what ``apply`` makes of tensors of these shapes."""

    @abstractmethod
    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the tensor of the checkpoint. Does not change ``tensors``."""


@dataclass(frozen=True)
class PairedRows(Change):
    """Order the rows of queries or keys so that the halves of each head are rotated together; in the file, adjacent rows
    are. ``heads`` is the key of the metadata that has the number of heads, or that number."""

    heads: str | int
    keeps_rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        return shapes[0]

    def order(self, rows: int) -> np.ndarray:
        """Return the rows of the file in the order of the checkpoint."""
        assert isinstance(self.heads, int)
        return np.arange(rows).reshape(self.heads, rows // self.heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        (tensor,) = tensors
        return tensor[self.order(tensor.shape[0]).tolist()]


@dataclass(frozen=True)
class Offset(Change):
    """Add ``value``."""

    value: float

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        return shapes[0]

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        return tensors[0] + self.value


@dataclass(frozen=True)
class Unsqueezed(Change):
    """Make a matrix of one row of a vector."""

    keeps_rows = True

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        return shapes[0] if len(shapes[0]) > 1 else (1, *shapes[0])

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        return tensors[0] if tensors[0].ndim > 1 else tensors[0][None]


@dataclass(frozen=True)
class Transposed(Change):
    """Exchange the last two dimensions."""

    expects = "two or more dimensions"

    def fits(self, *shapes: Shape) -> bool:
        """See ``Change``."""
        return len(shapes) == 1 and len(shapes[0]) > 1

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        *first, rows, columns = shapes[0]
        return (*first, columns, rows)

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        return tensors[0].transpose(-1, -2)


@dataclass(frozen=True)
class Rows(Change):
    """Put tensors after each other in dimension ``dim``, which is not the last one."""

    dim: int
    keeps_rows = True
    expects = "equal shapes but for the rows"

    def fits(self, *shapes: Shape) -> bool:
        """See ``Change``."""
        rests = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in shapes}
        return len(rests) == 1 and all(len(shape) > self.dim + 1 for shape in shapes)

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        made = list(shapes[0])
        made[self.dim] = sum(shape[self.dim] for shape in shapes)
        return tuple(made)

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        import torch

        return torch.cat(tuple(tensors), self.dim)


@dataclass(frozen=True)
class Interleaved(Change):
    """Let the rows of two stacks of matrices ``[n, rows, columns]`` alternate, or the elements of two stacks of vectors.
    With ``transposed``, the last two dimensions are exchanged then."""

    transposed: bool = False
    expects = "equal shapes [experts, rows, columns], or [experts, elements] of biases"

    def fits(self, *shapes: Shape) -> bool:
        """See ``Change``."""
        return len({*shapes}) == 1 and len(shapes[0]) == (3 if self.transposed else 2)

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        number, rows, *rest = shapes[0]
        return (number, *rest, 2 * rows) if self.transposed else (number, 2 * rows, *rest)

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        import torch

        made = torch.stack(tuple(tensors), 2).flatten(1, 2)
        return made.transpose(1, 2) if self.transposed else made


@dataclass(frozen=True)
class ExpandKeyValue(Change):
    """Join the two parts of the expansion of latents (MLA): keys ``[heads, latent, key]`` and values
    ``[heads, value, latent]`` become ``[heads * (key + value), latent]``."""

    expects = "[heads, latent, key] and [heads, value, latent]"

    def fits(self, *shapes: Shape) -> bool:
        """See ``Change``."""
        keys, values = shapes
        return len(keys) == len(values) == 3 and (keys[0], keys[1]) == (values[0], values[2])

    def shape(self, *shapes: Shape) -> Shape:
        """See ``Change``."""
        (heads, latent, key), (_, value, _) = shapes
        return (heads * (key + value), latent)

    def apply(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """See ``Change``."""
        import torch

        keys, values = tensors
        return torch.cat((keys.transpose(1, 2), values), 1).flatten(0, 1)

"""Define the mesh: the ranks among which a model is divided, and how they communicate.

A rank is one process with one device. With tensor parallelism (``tp``), every rank holds a share of each layer and runs
the same steps in the same order. ``Mesh`` has one ``Collectives`` for each kind of parallelism. It is made once and
handed down explicitly, to the engine, and by the engine to models (``cls(info, mesh)``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from dovetail.errors import ConfigError

if TYPE_CHECKING:
    import torch


class Collectives(ABC):
    """Communicate among the ranks of one kind of parallelism.

    All ranks must call the same methods in the same order, with arguments of the same shapes and dtypes. Results have
    the same bits on all ranks, because the ranks take decisions (such as sampling) from them without comparing them.
    Tensors may have no rows. The methods that take tensors run on the current stream, do not wait for the device, and
    can be captured in CUDA graphs. ``agree`` and ``min`` wait for all ranks on the host. Every wait has a deadline:
    when it has passed, or when a rank is lost, the method raises ``RankLostError`` (in CUDA graphs, the device reports
    the error later).
    """

    rank: int
    """Hold the number of this rank, from 0 to ``size - 1``."""
    size: int
    """Hold the number of ranks."""
    adds_parts: bool = False
    """Hold True if ``all_reduce_norm`` also takes parts of a product."""

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of contiguous ``x`` over all ranks, with the shape and dtype of ``x``. May overwrite ``x`` and
        return it. The caller owns the result and may overwrite it."""

    @abstractmethod
    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``(norm, sum)``, both like ``residual``: ``sum`` is the sum of ``x`` over all ranks plus ``residual``
        (which is the same on all ranks), ``norm`` is ``sum / sqrt(mean(sum^2) + eps) * weight``.

        ``x`` and ``residual`` are contiguous ``[tokens, size]`` of one dtype, ``weight`` is ``[size]``, of that
        dtype or float32. With
        ``adds_parts``, ``x`` may also be the parts of a product, float32 ``[parts, tokens, size]``, whose sum over the
        first dimension is rounded to the dtype of ``residual`` before the ranks add it up. May overwrite ``x``, and
        must not change ``residual``. The caller owns the results and may overwrite them.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """Return ``x [n, m]`` of all ranks side by side, in the order of the ranks: contiguous ``[n, size * m]``, or
        ``[n, width]`` if ``width`` is given, which leaves out the last columns. Does not change ``x``."""

    @abstractmethod
    def agree(self, ok: bool) -> bool:
        """Return True if all ranks call this with True."""

    @abstractmethod
    def min(self, value: int) -> int:
        """Return the smallest ``value`` of all ranks."""

    def share(self, count: int) -> tuple[int, int]:
        """Return the start and the size of this rank's share of ``count`` equal things, such as heads: the ranks divide
        them evenly. If there are fewer things than ranks, several ranks have a share of the same one thing. Raises
        ``ConfigError`` if neither number divides the other."""
        if count % self.size == 0:
            size = count // self.size
            return self.rank * size, size
        if self.size % count == 0:
            return self.rank * count // self.size, 1
        raise ConfigError(f"{count} cannot be divided evenly among {self.size} ranks; allowed: a divisor or a multiple")

    def ragged_share(self, count: int) -> tuple[int, int]:
        """Return the start and the size of this rank's share of ``count`` things, such as tokens of the vocabulary. All
        ranks have the same number of them, except that the last one may have fewer. Raises ``ConfigError`` if it would
        have none."""
        size = -(-count // self.size)
        if size * (self.size - 1) >= count:
            raise ConfigError(f"{count} cannot be divided among {self.size} ranks so that each has a share")
        start = self.rank * size
        return start, min(size, count - start)

    def close(self) -> None:
        """Release what is shared with the other ranks. No method may be called afterwards."""
        return


class OneRank(Collectives):
    """Be the only rank. Every method returns what this rank has."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Collectives.all_reduce``."""
        return x

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``Collectives.all_reduce_norm``."""
        total = x + residual
        scale = (total.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        return ((total * scale).to(total.dtype) * weight).to(total.dtype), total

    def all_gather(self, x: torch.Tensor, width: int | None = None) -> torch.Tensor:
        """See ``Collectives.all_gather``."""
        return x if width is None else x[:, :width].contiguous()

    def agree(self, ok: bool) -> bool:
        """See ``Collectives.agree``."""
        return ok

    def min(self, value: int) -> int:
        """See ``Collectives.min``."""
        return value


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """Hold the place of this process among the ranks. ``tp`` are the ranks of tensor parallelism.

    ``experts`` is how they divide layers of experts: ``tp`` gives each rank a share of every expert, ``ep`` some whole
    experts. ``attention`` is how they divide attention: ``heads`` gives each rank some heads of all requests, ``data`` all
    heads of some requests, whose keys and values only this rank keeps. In all cases all ranks have all tokens between the
    layers, and add up what they compute.
    """

    tp: Collectives
    experts: Literal["tp", "ep"] = "tp"
    attention: Literal["heads", "data"] = "heads"

    @property
    def of_attention(self) -> Mesh:
        """Return the mesh that divides the heads of attention. With ``data``, every rank has all of them."""
        return self if self.attention == "heads" else SINGLE


SINGLE = Mesh(OneRank())
"""The mesh of a process that runs the whole model."""

"""Define what the products of adapters (LoRA) compute with: the matrices of a layer, and the slots of the tokens of a step."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from dovetail.types import IntArray


class AdapterCount(IntEnum):
    """Say how many adapters the rows of a step have, as far as kernels depend on it (``low_rank.adapter_count``). The kernels for each also
    compute steps with fewer adapters, but not as fast."""

    NONE = 0
    ONE = 1
    FEW = 2
    SEVERAL = 3
    MANY = 4


@dataclass(frozen=True, slots=True, eq=False)
class LowRankWeights:
    """Hold the matrices that the adapters of all slots have for one linear layer.

    The layer holds ``parts``, (start, size) of their rows, such as the projections of queries, keys and values. ``a`` is
    ``[slots, parts, rank, in]`` and ``b`` ``[slots, out, rank]``; of part p of slot s only the first ``ranks[s, p]`` of
    ``rank`` are used, and those up to the next multiple of 16 are finite. ``ranks`` is in host memory, ``device_ranks`` its copy on CUDA, or None. ``blocks`` (int32
    ``[blocks, 3]``: part, first row, last row + 1) divides the rows among the programs of a kernel. ``arrived`` (int32, zeros, from
    ``triton.low_rank_few.arrivals``) counts parts of sums on CUDA; only layers whose kernels run one after the other may share it.
    """

    a: torch.Tensor
    b: torch.Tensor
    parts: tuple[tuple[int, int], ...]
    ranks: IntArray
    device_ranks: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    arrived: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddingLowRank(LowRankWeights):
    """Hold the matrices that the adapters of all slots have for an embedding: ``a [slots, tokens of the vocabulary, rank]`` has a
    row for each token that this rank holds, ``b [slots, out, rank]`` has one part."""


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLowRank(LowRankWeights):
    """Hold the matrices that the adapters of all slots have for one product of the experts that this rank holds: ``a [slots,
    experts, parts, rank, in]``, ``b [slots, experts, out, rank]``, ranks ``[slots, experts * parts]``. ``parts`` and
    ``blocks`` are those of one expert."""


class ExpertPairLowRank(NamedTuple):
    """Hold the matrices of both products of a layer of experts: ``gate_up``, whose parts are gate and up, and ``down``."""

    gate_up: ExpertLowRank
    down: ExpertLowRank


class TokenTiles(NamedTuple):
    """Hold the tokens of a step in an order in which those of one slot are adjacent, on CUDA: ``order`` int32 ``[tokens]``, of
    which only those with an adapter count, and ``tiles`` int32 ``[tiles, 3]``: slot, start in ``order``, and number of
    tokens, which is 0 in tiles that pad a graph. A tile has at most ``size`` tokens. ``places`` int32 ``[tokens]`` has the tile
    of each token, or -1.

    ``slots`` int32 ``[tokens]`` are the slots that occur, each once, and ``groups`` int32 ``[tokens]`` has the index in ``slots`` of each
    token, or -1. ``used`` int32 ``[2]`` is the number of tiles that do not pad, and of slots that occur. Kernels are
    chosen by ``adapters``, when a step is captured."""

    order: torch.Tensor
    tiles: torch.Tensor
    size: int
    places: torch.Tensor
    used: torch.Tensor
    groups: torch.Tensor
    slots: torch.Tensor
    adapters: AdapterCount


class TokenSlots(NamedTuple):
    """Assign the tokens of a step to slots. ``groups`` are the slots that occur, each with the indices of its tokens (int64,
    None: all tokens), and ``slots`` (int64 ``[tokens]``) has the slot of each token, or -1. On CUDA, ``tiles`` take their place."""

    num_tokens: int
    groups: tuple[tuple[int, torch.Tensor | None], ...] = ()
    tiles: TokenTiles | None = None
    slots: torch.Tensor | None = None

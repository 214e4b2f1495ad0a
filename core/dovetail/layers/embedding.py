"""Embed tokens, and map hidden states to logits. Both are divided among ranks by tokens of the vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.model import TensorShare, WeightTarget
from dovetail.layers.base import Layer, parameter
from dovetail.layers.linear import Linear

if TYPE_CHECKING:
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.quantization import LinearInput
    from dovetail.layers.adapters import EmbeddingAdapters

_FEW = 16
"""Up to this number of rows, torch's ``index_select`` reads one after the other on CUDA: 16 rows of 8 KiB take 7.8 us instead of 1.6 (H200)."""


class Embedding(Layer):
    """Look up rows of ``weight``, which holds this rank's share of the rows ``[vocab_size, hidden_size]``. ``adapters`` are
    added to them."""

    adapters: EmbeddingAdapters | None = None

    def __init__(self, vocab_size: int, hidden_size: int, mesh: Mesh) -> None:
        super().__init__()
        self._start, self._size = mesh.tp.ragged_share(vocab_size)
        self.weight = parameter(self._size, hidden_size)
        self._tp = mesh.tp if mesh.tp.size > 1 else None
        self._vocab_size = vocab_size

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ``token_ids [tokens]`` to embeddings ``[tokens, hidden_size]``, a new tensor."""
        if self._tp is None:
            found = _rows(self.weight, token_ids)
            if self.adapters is not None:
                self.adapters.add(found, token_ids)
            return found
        rows = token_ids - self._start
        outside = (rows < 0) | (rows >= self._size)
        found = _rows(self.weight, rows.masked_fill_(outside, 0))
        if self.adapters is not None:
            self.adapters.add(found, rows)
        return self._tp.all_reduce(found.masked_fill_(outside[:, None], 0))

    def target(self, parameter: str) -> WeightTarget:
        """Return where the checkpoint's embedding goes. ``parameter`` is the full name of ``weight`` in the model."""
        if self._tp is None:
            return WeightTarget(parameter)
        return WeightTarget(parameter, shares=(TensorShare(0, self._start, self._size, self._vocab_size),))


def _rows(weight: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of ``weight`` at ``indices``, a new tensor."""
    return weight[indices] if weight.is_cuda and 1 < len(indices) <= _FEW else weight.index_select(0, indices)


class LMHead(Linear):
    """Compute logits of hidden states: this rank's share of them, which the ranks then gather. If the head is tied to
    an embedding, it shares that layer's weight, of which a checkpoint has one copy."""

    precise = True

    def __init__(
        self, hidden_size: int, vocab_size: int, mesh: Mesh, *, tied: Embedding | None = None, bias: bool = False
    ) -> None:
        start, size = mesh.tp.ragged_share(vocab_size)
        super().__init__(hidden_size, 0 if tied else size)
        self.bias = parameter(size) if bias else None
        self.tied = tied is not None
        if tied is not None:
            self.weight, self.out_features = tied.weight, size
        self._tp = mesh.tp if mesh.tp.size > 1 else None
        self._share = TensorShare(0, start, size, vocab_size)
        self._padding = -(-vocab_size // mesh.tp.size) - size

    def untie(self) -> None:
        """Give a tied head a weight of its own, which is not initialised."""
        self.weight, self.tied = nn.Parameter(torch.empty_like(self.weight), requires_grad=False), False

    def forward(self, x: LinearInput) -> torch.Tensor:
        """Map contiguous ``x [n, hidden_size]`` to ``[n, vocab_size]``. Mutates nothing."""
        logits = super().forward(x)
        if self._tp is None:
            return logits
        if self._padding:
            logits = functional.pad(logits, (0, self._padding))
        return self._tp.all_gather(logits, self._share.whole)

    def target(self, parameter: str, part: str | None = None) -> WeightTarget:
        """See ``Linear.target``."""
        return WeightTarget(parameter, shares=() if self._tp is None else (self._share,))

"""Embed tokens, and map hidden states to logits."""

from __future__ import annotations

import torch

from dovetail.layers.base import Layer, parameter
from dovetail.layers.linear import Linear


class Embedding(Layer):
    """Look up rows of ``weight [vocab_size, hidden_size]``."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map int64 ``token_ids [tokens]`` to embeddings ``[tokens, hidden_size]``, a new tensor."""
        return self.weight.index_select(0, token_ids)


class LMHead(Linear):
    """Compute logits of hidden states. If it is tied to an embedding, it shares that layer's weight and has no
    parameter in a checkpoint."""

    def __init__(self, hidden_size: int, vocab_size: int, *, tied: Embedding | None = None) -> None:
        super().__init__(hidden_size, 0 if tied else vocab_size)
        if tied is not None:
            self.weight = tied.weight

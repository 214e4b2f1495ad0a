"""Define heads that continue from the target's hidden states one token at a time: EAGLE-3 and multi-token prediction.

A head's key at position i is computed from the target's hidden state at i and the embedding of the token at i + 1, and
its output there predicts the token at i + 2. Training continues for some steps with the head's own output instead of
the hidden state, as drafting does ("training-time test", Li et al., 2025, EAGLE-3), so that the head learns to handle
its own errors.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

import torch
from tools.speculative.drafter import Drafter, at_anchors
from tools.speculative.layers import Keys, joined
from tools.speculative.llama import Llama
from tools.speculative.texts import View
from torch import Tensor


class Chain(Drafter):
    """Draft a chain of tokens. Subclasses define the input and the computation of the layer."""

    @abstractmethod
    def enter(self, view: View) -> Tensor:
        """Return the head's hidden state at every position, computed from the target's states: ``[B, L, D]``."""

    @abstractmethod
    def mix(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """Return the input of the layer for a hidden state and the embedding of the next token, both ``[..., D]``."""

    @abstractmethod
    def keys(self, mixed: Tensor, positions: Tensor) -> Keys:
        """Return the keys of the result of ``mix``, which other positions attend to."""

    @abstractmethod
    def layer(
        self, mixed: Tensor, hidden: Tensor, positions: Tensor, text: Keys, limits: Tensor, own: Keys | None
    ) -> Tensor:
        """Return the head's output ``[B, A, 1, D]``; see ``Attention.anchored``."""

    @abstractmethod
    def logits(self, target: Llama, output: Tensor) -> Tensor:
        """Return the logits of outputs: ``[B, A, D]`` -> ``[B, A, draft vocabulary]``."""

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to ids of the target's vocabulary."""
        return ids

    def unroll(
        self, target: Llama, view: View, anchors: Tensor, steps: int, labels: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Yield the logits ``[B, A, draft vocabulary]`` of each step. Each step continues with ``labels [B, A,
        steps]``, or with the likeliest token if there are no labels."""
        embeds, slots = target.embed(view.ids[:, 1:]), self.enter(view)[:, :-1]
        positions = torch.arange(slots.shape[1], device=anchors.device).expand(slots.shape[:2])
        mixed = self.mix(slots, embeds)
        text, own = self.keys(mixed, positions), []
        hidden, mixed = (at_anchors(x, anchors - 1).unsqueeze(2) for x in (slots, mixed))
        for step in range(steps):
            at = (anchors - 1 + step)[..., None]
            if step:
                own.append(self.keys(mixed, at))
            hidden = self.layer(mixed, hidden, at, text, anchors, joined(own))
            logits = self.logits(target, hidden[:, :, 0])
            yield logits
            token = self.to_target(logits.argmax(dim=-1)) if labels is None else labels[..., step]
            mixed = self.mix(hidden, target.embed(token)[:, :, None])

    @torch.no_grad()
    def draft(self, target: Llama, view: View, anchors: Tensor) -> Tensor:
        """Draft greedily."""
        steps = self.unroll(target, view, anchors, self.drafts)
        return torch.stack([self.to_target(logits.argmax(dim=-1)) for logits in steps], dim=-1)

"""Heads that go on from the target's hidden states, one token at a time: EAGLE-3 and multi-token prediction.

A head's key at place i is made of the target's hidden state at i and the embedding of the token at i + 1, and its output
there says which token is at i + 2. Training goes on for some steps with the head's own output in the hidden state's stead, as
drafting does ("training-time test", Li et al., 2025, EAGLE-3), so that it learns to bear its own errors.
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
    """Subclasses say what the layer reads and what it makes of it."""

    @abstractmethod
    def enter(self, view: View) -> Tensor:
        """Of the target's states: what stands for the hidden state at every place, ``[B, L, D]``."""

    @abstractmethod
    def mix(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """What the layer reads, of a hidden state and the embedding of the next token, both ``[..., D]``."""

    @abstractmethod
    def keys(self, mixed: Tensor, positions: Tensor) -> Keys:
        """What other places see of ``mix``'s result."""

    @abstractmethod
    def layer(
        self, mixed: Tensor, hidden: Tensor, positions: Tensor, text: Keys, limits: Tensor, own: Keys | None
    ) -> Tensor:
        """The head's output ``[B, A, 1, D]``; see ``Attention.anchored``."""

    @abstractmethod
    def logits(self, target: Llama, output: Tensor) -> Tensor:
        """``[B, A, D]`` -> ``[B, A, draft vocabulary]``."""

    def to_target(self, ids: Tensor) -> Tensor:
        """Ids of the draft vocabulary in the target's."""
        return ids

    def unroll(
        self, target: Llama, view: View, anchors: Tensor, steps: int, labels: Tensor | None = None
    ) -> Iterator[Tensor]:
        """Logits ``[B, A, draft vocabulary]`` of each step. It goes on with ``labels [B, A, steps]``, or with its own first
        choice where there are none."""
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
        """Greedy."""
        steps = self.unroll(target, view, anchors, self.drafts)
        return torch.stack([self.to_target(logits.argmax(dim=-1)) for logits in steps], dim=-1)

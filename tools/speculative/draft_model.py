"""Define a small Llama with the target's vocabulary that drafts without the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from tools.speculative.drafter import Drafter, at_anchors, distil
from tools.speculative.layers import Keys, Layer, Shape, initialise, joined
from tools.speculative.llama import Llama, llama_config
from tools.speculative.texts import Sample, View
from torch import Tensor


class DraftModel(Drafter):
    """Learn the target's distribution at every position of the target's texts."""

    name = "draft_model"
    drafts = 4

    def __init__(self, shape: Shape, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.llama = Llama(shape, layers, vocab_size)
        initialise(self, layers)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a LlamaForCausalLM."""
        return dict(self.llama.state_dict())

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what ``tensors`` returns."""
        self.llama.load_state_dict(tensors)

    def loss(self, target: Llama, sample: Sample) -> Tensor:
        """Return the loss of next-token prediction over all tokens to be learned."""
        chosen = sample.learn[:, 1:]
        with torch.no_grad():
            goal = target.logits(sample.view.states[-1][:, :-1][chosen])
        states, _ = self.llama.read(sample.view.ids)
        said = self.llama.logits(states[-1][:, :-1][chosen])
        return distil(said, goal, torch.ones(len(goal), device=goal.device))

    @torch.no_grad()
    def draft(self, target: Llama, view: View, anchors: Tensor) -> Tensor:
        """Draft greedily."""
        states, text = self.llama.read(view.ids)
        x = at_anchors(states[-1], anchors)
        own: list[list[Keys]] = [[] for _ in text]
        drafts = [self.llama.logits(x).argmax(dim=-1)]
        for step in range(1, self.drafts):
            at, x = (anchors + step)[..., None], self.llama.embed(drafts[-1])[:, :, None]
            for layer, seen, mine in zip(self.llama.model.layers, text, own, strict=True):
                assert isinstance(layer, Layer)
                mine.append(layer.keys(x, at))
                x = layer.anchored(x, at, seen, anchors + 1, joined(mine))
            drafts.append(self.llama.logits(self.llama.model.norm(x[:, :, 0])).argmax(dim=-1))
        return torch.stack(drafts, dim=-1)

    def config(self, target: Llama) -> dict[str, Any]:
        """Return the config of a LlamaForCausalLM."""
        return llama_config(self.llama)

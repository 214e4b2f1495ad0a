"""Define a DFlash drafter (Chen et al., 2026), which fills a whole block of masks in one pass with the target's hidden
states.

A block is the last known token followed by masks. The tokens of a block attend to each other in both directions, and to
the text before through keys computed from the target's hidden states. The output at a mask predicts the token at its
position.
"""

from __future__ import annotations

from typing import Any

import torch
from tools.speculative.drafter import Drafter, distil
from tools.speculative.eagle3 import shape_config
from tools.speculative.layers import Layer, Shape, initialise
from tools.speculative.llama import Llama
from tools.speculative.texts import Sample, View
from tools.tiny.model import Norm
from torch import Tensor, nn

DECAY = 0.85
"""Factor between the weights of consecutive drafts in the loss."""
MASK = 9
"""The id of ``<|reserved_0|>``."""


class DFlash(Drafter):
    """Draft a block of tokens in one pass. ``target_layers`` are the layers of the target whose outputs it reads. It
    uses the target's embedding and output matrix."""

    name = "dflash"
    drafts = 7

    def __init__(self, shape: Shape, layers: int, target_layers: tuple[int, ...], target: Llama) -> None:
        """Initialise the final norm with the target's."""
        super().__init__()
        self.shape, self.target_layers = shape, target_layers
        self.fc = nn.Linear(len(target_layers) * shape.hidden_size, shape.hidden_size, bias=False)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(shape, qk_norm=True) for _ in range(layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        initialise(self, layers)
        self.norm.load_state_dict(target.model.norm.state_dict())

    def states(self, target: Llama, view: View, anchors: Tensor) -> Tensor:
        """Return the final states at the masks of a block after each anchor: ``[B, A, drafts, D]``."""
        known = self.hidden_norm(self.fc(torch.cat([view.states[layer + 1] for layer in self.target_layers], dim=-1)))
        places = torch.arange(view.ids.shape[1], device=anchors.device).expand_as(view.ids)
        block = torch.full((*anchors.shape, self.drafts + 1), MASK, device=anchors.device)
        block[..., 0] = torch.take_along_dim(view.ids, anchors, dim=1)
        at = anchors[..., None] + torch.arange(self.drafts + 1, device=anchors.device)
        x = target.embed(block)
        for layer in self.layers:
            assert isinstance(layer, Layer)
            text = layer.self_attn.keys(known, places)
            x = layer.anchored(x, at, text, anchors, layer.keys(x, at))
        return self.norm(x)[:, :, 1:]

    def loss(self, target: Llama, sample: Sample) -> Tensor:
        """Return the loss of all positions of a block at once."""
        goals = sample.goals(self.drafts, DECAY)
        with torch.no_grad():
            goal = target.logits(goals.states)
        return distil(target.logits(self.states(target, sample.view, sample.anchors)), goal, goals.weights)

    @torch.no_grad()
    def draft(self, target: Llama, view: View, anchors: Tensor) -> Tensor:
        """Draft greedily, all positions at once."""
        return target.logits(self.states(target, view, anchors)).argmax(dim=-1)

    def config(self, target: Llama) -> dict[str, Any]:
        """Return the content of config.json, as in published checkpoints."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.vocab_size,
            "num_hidden_layers": len(self.layers),
            "num_target_layers": target.num_layers,
            "block_size": self.drafts + 1,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(self.target_layers)},
            "layer_types": ["full_attention"] * len(self.layers),
            **shape_config(self.shape),
            "tie_word_embeddings": True,
        }

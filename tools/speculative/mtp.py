"""Define a multi-token prediction layer in the layout of DeepSeek-V3, which is stored in the target's checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from tools.speculative.chain import Chain
from tools.speculative.drafter import distil
from tools.speculative.layers import Keys, Layer, Shape, initialise
from tools.speculative.llama import Llama
from tools.speculative.texts import Sample, View
from tools.tiny.model import Norm
from torch import Tensor, nn

DECAY = 0.8
"""Factor between the weights of consecutive drafts in the loss."""


class SharedHead(nn.Module):
    """Hold the norm before the target's output matrix."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class MtpLayer(Layer):
    """Hold a decoder layer, the projection of hidden state and embedding before it, and the norm after it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.enorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hnorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.shared_head = SharedHead(shape)


class Mtp(Chain):
    """Draft a chain with one layer that is used again for every further token. It uses the target's embedding and
    output matrix."""

    name = "mtp"
    drafts = 3

    def __init__(self, shape: Shape, target: Llama) -> None:
        """Place the layer after the target's main layers, and initialise its norm with the target's final norm."""
        super().__init__()
        self.prefix = f"model.layers.{target.num_layers}."
        self.block = MtpLayer(shape)
        initialise(self, 2)
        self.block.shared_head.norm.load_state_dict(target.model.norm.state_dict())

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors under the names of an additional layer of the target."""
        return {self.prefix + name: tensor for name, tensor in self.block.state_dict().items()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Load what ``tensors`` returns."""
        self.block.load_state_dict({name.removeprefix(self.prefix): tensor for name, tensor in tensors.items()})

    def enter(self, view: View) -> Tensor:
        """Return the target's final hidden states."""
        return view.states[-1]

    def mix(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """Project the concatenation of embedding and hidden state, each after its norm."""
        return self.block.eh_proj(torch.cat((self.block.enorm(embeds), self.block.hnorm(hidden)), dim=-1)).float()

    def keys(self, mixed: Tensor, positions: Tensor) -> Keys:
        """Return the keys of the single layer."""
        return self.block.keys(mixed, positions)

    def layer(
        self, mixed: Tensor, hidden: Tensor, positions: Tensor, text: Keys, limits: Tensor, own: Keys | None
    ) -> Tensor:
        """Run the decoder layer. The next step continues with its output after the norm."""
        return self.block.shared_head.norm(self.block.anchored(mixed, positions, text, limits, own))

    def logits(self, target: Llama, output: Tensor) -> Tensor:
        """Return logits over the target's vocabulary."""
        return target.logits(output)

    def loss(self, target: Llama, sample: Sample) -> Tensor:
        """Return the loss over ``drafts`` steps."""
        goals = sample.goals(self.drafts, DECAY)
        with torch.no_grad():
            goal = target.logits(goals.states)
        steps = list(self.unroll(target, sample.view, sample.anchors, self.drafts, goals.labels))
        return distil(torch.stack(steps, dim=2), goal, goals.weights)

    def config(self, target: Llama) -> dict[str, Any]:
        """Return an empty config: the target's config.json counts the layer."""
        return {}

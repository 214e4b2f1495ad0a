"""Define an EAGLE-3 head (Li et al., 2025): one layer over three of the target's hidden states, with its own
vocabulary."""

from __future__ import annotations

from typing import Any

import torch
from tools.speculative.chain import Chain
from tools.speculative.drafter import distil
from tools.speculative.layers import Attention, Keys, Mlp, Shape, initialise
from tools.speculative.llama import Llama
from tools.speculative.texts import Sample, View
from tools.tiny.model import Norm
from torch import Tensor, nn

DECAY = 0.9
"""Factor between the weights of consecutive drafts in the loss."""


class MidLayer(nn.Module):
    """Hold the decoder layer, whose attention reads the concatenation of embedding and hidden state."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.hidden_norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)


class Eagle3(Chain):
    """Draft a chain from three hidden states of the target. ``tokens`` are the target's ids of the draft vocabulary,
    ascending, and ``layers`` are the layers of the target whose outputs it reads."""

    name = "eagle3"
    drafts = 5
    d2t: Tensor

    def __init__(self, shape: Shape, tokens: Tensor, layers: tuple[int, int, int], target: Llama) -> None:
        """Initialise the final norm and the rows of the output matrix with the target's."""
        super().__init__()
        self.shape, self.layers = shape, layers
        self.fc = nn.Linear(3 * shape.hidden_size, shape.hidden_size, bias=False)
        self.midlayer = MidLayer(shape)
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(tokens), bias=False)
        self.register_buffer("d2t", tokens - torch.arange(len(tokens), device=tokens.device))
        self.register_buffer("t2d", torch.isin(torch.arange(target.vocab_size, device=tokens.device), tokens))
        initialise(self, 2)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head.load_state_dict({"weight": target.model.embed_tokens.weight[tokens.to(target.device)]})

    @property
    def tokens(self) -> Tensor:
        """Return the target's ids of the draft vocabulary, int64."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, ids: Tensor) -> Tensor:
        """Convert ids of the draft vocabulary to ids of the target's vocabulary."""
        return ids + self.d2t[ids]

    def enter(self, view: View) -> Tensor:
        """Combine three hidden states into one."""
        return self.fc(torch.cat([view.states[layer + 1] for layer in self.layers], dim=-1)).float()

    def mix(self, hidden: Tensor, embeds: Tensor) -> Tensor:
        """Concatenate embedding and hidden state, each after its norm."""
        return torch.cat((self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden)), dim=-1)

    def keys(self, mixed: Tensor, positions: Tensor) -> Keys:
        """Return the keys of the single layer."""
        return self.midlayer.self_attn.keys(mixed, positions)

    def layer(
        self, mixed: Tensor, hidden: Tensor, positions: Tensor, text: Keys, limits: Tensor, own: Keys | None
    ) -> Tensor:
        """Run the layer. The residual stream continues the hidden state."""
        attention = self.midlayer.self_attn
        x = hidden + attention.anchored(attention.queries(mixed, positions), text, limits, own)
        return x + self.midlayer.mlp(self.midlayer.post_attention_layernorm(x))

    def logits(self, target: Llama, output: Tensor) -> Tensor:
        """Return logits over the draft vocabulary."""
        return self.lm_head(self.norm(output))

    def loss(self, target: Llama, sample: Sample) -> Tensor:
        """Return the loss. Positions whose likeliest token is not in the draft vocabulary have no weight."""
        goals = sample.goals(self.drafts, DECAY)
        with torch.no_grad():
            all_logits = target.logits(goals.states)
            weights = goals.weights * self.t2d[all_logits.argmax(dim=-1)]
            goal = all_logits[..., self.tokens]
        steps = list(self.unroll(target, sample.view, sample.anchors, self.drafts, goals.labels))
        return distil(torch.stack(steps, dim=2), goal, weights)

    def config(self, target: Llama) -> dict[str, Any]:
        """Return the content of config.json, as SpecForge writes it."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "draft_vocab_size": len(self.d2t),
            "num_hidden_layers": 1,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers), "use_aux_hidden_state": True},
            **shape_config(self.shape),
            "tie_word_embeddings": False,
        }


def shape_config(shape: Shape) -> dict[str, Any]:
    """Return the part of config.json that describes a layer."""
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": 2048,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }

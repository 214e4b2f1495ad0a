"""Implement the layers of the target and of the drafters in plain torch, with the parameter names of published
checkpoints.

Shapes: B texts of L positions, A anchors per text, D channels, H query heads, G key and value heads, C channels per
head. An anchor is a position of a text after which drafts continue: a draft there attends to the text up to the anchor
and to the drafts before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tools.tiny.model import Norm
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Hold the sizes of a decoder layer; the field names are those of config.json."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


class Keys(NamedTuple):
    """Hold keys and values ``[..., positions, G, C]``."""

    k: Tensor
    v: Tensor


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Return the rotary embedding of ``x [..., heads, C]`` at ``positions [...]``; the halves of C are the two
    coordinates."""
    steps = torch.arange(0, x.shape[-1], 2, device=x.device, dtype=torch.float32) / x.shape[-1]
    angles = positions[..., None, None].float() * theta**-steps
    left, right = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Compute grouped-query attention. ``width`` is the size of the input of the projections; ``qk_norm`` adds the
    norms of Qwen3."""

    def __init__(self, shape: Shape, width: int, qk_norm: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(width, shape.num_attention_heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * shape.head_dim, shape.hidden_size, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None
        self.k_norm = Norm(shape.head_dim, shape.rms_norm_eps) if qk_norm else None

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return queries: ``[..., width]`` at ``positions [...]`` -> ``[..., H, C]``."""
        q = self.q_proj(x).unflatten(-1, (-1, self.shape.head_dim))
        q = q if self.q_norm is None else self.q_norm(q).to(q.dtype)
        return rotate(q, positions, self.shape.rope_theta)

    def keys(self, x: Tensor, positions: Tensor) -> Keys:
        """Return keys and values ``[..., G, C]`` of ``x [..., width]`` at ``positions [...]``."""
        k, v = (project(x).unflatten(-1, (-1, self.shape.head_dim)) for project in (self.k_proj, self.v_proj))
        k = k if self.k_norm is None else self.k_norm(k).to(k.dtype)
        return Keys(rotate(k, positions, self.shape.rope_theta), v)

    def causal(self, q: Tensor, keys: Keys) -> Tensor:
        """Return attention of every position to itself and the positions before: ``[B, L, H, C]`` -> ``[B, L, D]``."""
        share = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (x.repeat_interleave(share, dim=-2).transpose(1, 2) for x in keys)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def anchored(self, q: Tensor, text: Keys, limits: Tensor, own: Keys | None) -> Tensor:
        """Return attention of queries at anchors: ``[B, A, T, H, C]`` -> ``[B, A, T, D]``. The queries of an anchor
        attend to the first ``limits [B, A]`` positions of the text, ``[B, L, G, C]``, and to all of the anchor's own
        keys, ``[B, A, S, G, C]``."""
        q = q.unflatten(-2, (self.shape.num_key_value_heads, -1)) * self.shape.head_dim**-0.5
        scores = torch.einsum("batgrc,blgc->bgratl", q, text.k)
        hidden = torch.arange(text.k.shape[1], device=q.device) >= limits[..., None]
        scores = scores.masked_fill(hidden[:, None, None, :, None], float("-inf"))
        if own is not None:
            scores = torch.cat((scores, torch.einsum("batgrc,basgc->bgrats", q, own.k)), dim=-1)
        weights = scores.float().softmax(dim=-1).to(text.v.dtype)
        out = torch.einsum("bgratl,blgc->batgrc", weights[..., : text.v.shape[1]], text.v)
        if own is not None:
            out = out + torch.einsum("bgrats,basgc->batgrc", weights[..., text.v.shape[1] :], own.v)
        return self.o_proj(out.flatten(-3))


class Mlp(nn.Module):
    """Compute a SwiGLU MLP."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the MLP: ``[..., D]`` -> ``[..., D]``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Compute attention and MLP, each after a norm and with a residual."""

    def __init__(self, shape: Shape, qk_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape, shape.hidden_size, qk_norm)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = Mlp(shape)

    def text(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Keys]:
        """Run whole texts with causal attention: ``[B, L, D]`` -> ``[B, L, D]`` and their keys."""
        normed = self.input_layernorm(x)
        keys = self.self_attn.keys(normed, positions)
        x = x + self.self_attn.causal(self.self_attn.queries(normed, positions), keys)
        return x + self.mlp(self.post_attention_layernorm(x)), keys

    def anchored(self, x: Tensor, positions: Tensor, text: Keys, limits: Tensor, own: Keys | None) -> Tensor:
        """Run the layer at anchors: ``[B, A, T, D]`` -> ``[B, A, T, D]``; see ``Attention.anchored``."""
        queries = self.self_attn.queries(self.input_layernorm(x), positions)
        x = x + self.self_attn.anchored(queries, text, limits, own)
        return x + self.mlp(self.post_attention_layernorm(x))

    def keys(self, x: Tensor, positions: Tensor) -> Keys:
        """Return the keys of ``x [..., D]``, which other positions attend to."""
        return self.self_attn.keys(self.input_layernorm(x), positions)


def joined(own: list[Keys]) -> Keys | None:
    """Concatenate the keys of an anchor's drafts so far."""
    return Keys(torch.cat([x.k for x in own], dim=2), torch.cat([x.v for x in own], dim=2)) if own else None


def initialise(model: nn.Module, depth: int) -> None:
    """Initialise matrices with small normal numbers, which are smaller for outputs that are added to the residual
    stream."""
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            last = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5 if last else 0.02)

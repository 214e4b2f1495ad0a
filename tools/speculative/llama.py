"""Implement a Llama in plain torch, as the target and as the small draft model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tools.speculative.layers import Keys, Layer, Shape
from tools.tiny.model import Norm
from torch import Tensor, nn

STOPS = (0, 2)
CHECK_EVERY = 8
"""Steps of generating between looks at which texts have ended."""


class Body(nn.Module):
    """Hold everything under the name ``model.``."""

    def __init__(self, shape: Shape, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = Norm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """Compute a Llama whose output matrix is its embedding."""

    def __init__(self, shape: Shape, layers: int, vocab_size: int) -> None:
        super().__init__()
        self.shape, self.num_layers, self.vocab_size = shape, layers, vocab_size
        self.model = Body(shape, layers, vocab_size)

    @classmethod
    def load(cls, folder: Path, device: torch.device) -> Llama:
        """Return the checkpoint in ``folder``, in float32 and without gradients. Layers beyond the main ones are not
        read."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        shape = Shape(**{field.name: config[field.name] for field in fields(Shape)})
        model = cls(shape, config["num_hidden_layers"], config["vocab_size"])
        stored = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
        model.load_state_dict({name: stored[name] for name in model.state_dict()})
        return model.to(device).requires_grad_(False).eval()

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.model.embed_tokens.weight.device

    def embed(self, ids: Tensor) -> Tensor:
        """Map ``[...]`` to ``[..., D]``."""
        return self.model.embed_tokens(ids)

    def logits(self, hidden: Tensor) -> Tensor:
        """Map final hidden states ``[..., D]`` to logits ``[..., vocabulary]``."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def read(self, ids: Tensor) -> tuple[list[Tensor], list[Keys]]:
        """Read whole texts ``[B, L]``. Return the residual stream ``[B, L, D]`` that enters each layer and, last, the
        final hidden states; and each layer's keys. Padding at the end of a text does not change the positions before
        it."""
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states, keys = [self.embed(ids)], []
        for layer in self.model.layers:
            assert isinstance(layer, Layer)
            x, own = layer.text(states[-1], positions)
            states.append(x)
            keys.append(own)
        states[-1] = self.model.norm(states[-1])
        return states, keys

    def continue_texts(
        self, prompts: Sequence[np.ndarray], new: int, temperature: float, random: torch.Generator
    ) -> list[np.ndarray]:
        """Return each prompt with up to ``new`` tokens behind it, up to a stop token, which is kept; greedy where
        ``temperature`` is 0."""
        return Generation(self, prompts, new, temperature, random).run()


class Generation:
    """Generate texts together. Those that have ended are removed as soon as they are half of all."""

    def __init__(
        self, model: Llama, prompts: Sequence[np.ndarray], new: int, temperature: float, random: torch.Generator
    ) -> None:
        self.model, self.new, self.temperature, self.random = model, new, temperature, random
        self.device = model.device
        longest = max(map(len, prompts))
        self.capacity = -(-(longest + new) // 16) * 16
        self.ids = torch.zeros(len(prompts), self.capacity, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            self.ids[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        self.ids = self.ids.to(self.device)
        self.lens = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self.limits = self.lens + new
        self.rows = torch.arange(len(prompts), device=self.device)
        self.out: dict[int, np.ndarray] = {}
        self.keys = self._read(longest)

    @torch.no_grad()
    def _read(self, longest: int, at_once: int = 512) -> list[Keys]:
        """Return the keys of the prompts, except that of their last token, padded for the tokens to come."""
        parts = [self.model.read(rows[:, :longest])[1] for rows in self.ids.split(at_once)]
        pad = (0, 0, 0, 0, 0, self.capacity - longest)
        return [
            Keys(*(F.pad(torch.cat([part[layer][i] for part in parts]), pad) for i in range(2)))
            for layer in range(self.model.num_layers)
        ]

    @torch.no_grad()
    def run(self) -> list[np.ndarray]:
        """Generate to the end."""
        stops = torch.tensor(STOPS, device=self.device)
        for step in range(self.new):
            alive = torch.arange(len(self.ids), device=self.device)
            last = self.ids[alive, self.lens - 1]
            ended = torch.isin(last, stops) & (self.lens > self.limits - self.new)
            token = self._choose(self._step(last))
            going = ~ended
            self.ids[alive, self.lens.clamp(max=self.capacity - 1)] = torch.where(going, token, 0)
            self.lens = self.lens + going
            if step % CHECK_EVERY == 0:
                self._leave(ended)
            if not len(self.ids):
                break
        self._keep(torch.ones_like(self.lens, dtype=torch.bool))
        return [self.out[row] for row in range(len(self.out))]

    def _step(self, last: Tensor) -> Tensor:
        """Return the logits after each text's last token, and write that token's key."""
        at = self.lens - 1
        rows = torch.arange(len(last), device=self.device)
        seen = (torch.arange(self.capacity, device=self.device) <= at[:, None])[:, None, None]
        x = self.model.embed(last)
        for layer, keys in zip(self.model.model.layers, self.keys, strict=True):
            assert isinstance(layer, Layer)
            normed = layer.input_layernorm(x)
            new = layer.self_attn.keys(normed, at)
            keys.k[rows, at], keys.v[rows, at] = new.k.to(keys.k.dtype), new.v.to(keys.v.dtype)
            q = layer.self_attn.queries(normed, at).unflatten(-2, (new.k.shape[-2], -1)).to(keys.k.dtype)
            out = F.scaled_dot_product_attention(q, keys.k.transpose(1, 2), keys.v.transpose(1, 2), attn_mask=seen)
            x = x + layer.self_attn.o_proj(out.flatten(1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.model.logits(self.model.model.norm(x)).float()

    def _choose(self, logits: Tensor) -> Tensor:
        if not self.temperature:
            return logits.argmax(dim=-1)
        return torch.multinomial((logits / self.temperature).softmax(dim=-1), 1, generator=self.random)[:, 0]

    def _leave(self, ended: Tensor) -> None:
        """Remove the rows of texts that have ended, if there are many."""
        if 2 * int(ended.sum()) < len(ended):
            return
        self._keep(ended)
        stay = (~ended).nonzero()[:, 0]
        self.ids, self.lens, self.limits, self.rows = (
            x.index_select(0, stay) for x in (self.ids, self.lens, self.limits, self.rows)
        )
        self.keys = [Keys(*(x.index_select(0, stay) for x in keys)) for keys in self.keys]

    def _keep(self, which: Tensor) -> None:
        chosen = which.nonzero()[:, 0]
        ids, lens = self.ids[chosen].cpu().numpy().astype(np.uint16), self.lens[chosen].tolist()
        for row, tokens, length in zip(self.rows[chosen].tolist(), ids, lens, strict=True):
            self.out[row] = tokens[:length].copy()


def llama_config(model: Llama) -> dict[str, Any]:
    """Return the content of config.json."""
    shape = {field.name: getattr(model.shape, field.name) for field in fields(Shape)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "num_hidden_layers": model.num_layers,
        **shape,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }

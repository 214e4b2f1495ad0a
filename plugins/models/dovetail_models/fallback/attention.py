"""Connect transformers' attention interface with Dovetail's attention backends and KV pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from dovetail.interfaces.attention import AttentionLayer
from dovetail.interfaces.mesh import Mesh
from dovetail.layers.base import Layer
from dovetail.types import Batch
from dovetail_models.describe import LayerPlace
from dovetail_models.fallback.facts import AttentionFacts

ATTRIBUTE = "dovetail_attention"
"""The attribute of a module of transformers that computes what the module asks of the attention interface."""


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attended values of ``query [1, heads, tokens, head_dim]``, ``[1, tokens, heads, value_dim]``. This is the
    function that transformers' interface calls; ``module`` has what computes it (see ``ATTRIBUTE``)."""
    return getattr(module, ATTRIBUTE).attend(query, key, value, attention_mask, kwargs), None


class CurrentStep:
    """Hold the batch of the step that a model computes, for its attention layers: transformers' modules do not pass it on."""

    batch: Batch


class PagedAttention(Layer):
    """Store the keys and values of a step, and attend over the pool. Every rank has its share of the heads: if the model's
    code computes all of them on every rank, this layer takes the rank's own, and gathers what they return."""

    def __init__(self, facts: AttentionFacts, place: LayerPlace, step: CurrentStep, mesh: Mesh) -> None:
        super().__init__()
        self.constants = AttentionLayer(place.layer_id, facts.scale, facts.window, facts.soft_cap)
        self.group = place.group
        self._step, self._tp = step, mesh.tp
        self._queries, self._keys = mesh.tp.share(facts.num_heads), mesh.tp.share(facts.num_kv_heads)
        self._sinks: tuple[nn.Module, str] | None = None
        self._value_dim = facts.value_dim
        self._width = facts.num_heads * facts.value_dim
        self._key_padding, self._value_padding = facts.pool_dim - facts.head_dim, facts.pool_dim - facts.value_dim

    def use_sinks(self, module: nn.Module, name: str) -> None:
        """Read attention sinks from the parameter ``name [heads]`` of ``module``, when weights are loaded."""
        self._sinks = (module, name)

    def prepare(self) -> None:
        """See ``Layer.prepare``."""
        if self._sinks is not None:
            module, name = self._sinks
            first, own = self._queries
            sinks = getattr(module, name).detach().float()[first : first + own].contiguous()
            self.constants = replace(self.constants, sinks=sinks)
        super().prepare()

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> torch.Tensor:
        """Return the attended values ``[1, tokens, heads, value_dim]``. All arguments after ``value`` are constants, which
        were read when the model was described."""
        batch, group = self._step.batch, self.group
        heads, (first, own) = query.shape[1], self._queries
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
        if heads != own:
            kv_first, kv_own = self._keys
            q, k, v = (
                q[:, first : first + own],
                k[:, kv_first : kv_first + kv_own],
                v[:, kv_first : kv_first + kv_own],
            )
        if self._key_padding:
            q, k = functional.pad(q, (0, self._key_padding)), functional.pad(k, (0, self._key_padding))
        if self._value_padding:
            v = functional.pad(v, (0, self._value_padding))
        view = batch.view(group) if group else batch
        batch.kv[group].store(self.constants.layer_id, _plain(k), _plain(v), view.out_loc)
        attended = batch.attn[group].forward(_plain(q), self.constants, view)[..., : self._value_dim]
        if heads != own:
            whole = self._tp.all_gather(attended.reshape(len(attended), -1), self._width)
            attended = whole.view(len(whole), heads, self._value_dim)
        return attended.unsqueeze(0)


def _plain(x: torch.Tensor) -> torch.Tensor:
    """Return ``x [tokens, heads, head_dim]`` with the strides of a new tensor, which a single head need not have."""
    x = x.contiguous()
    return x if x.shape[1] > 1 else x.view(len(x), -1).view(x.shape)

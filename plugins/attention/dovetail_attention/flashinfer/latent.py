"""Run FlashInfer over latents (MLA), and over the keys and values that prompts expand latents to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import flashinfer  # pyright: ignore[reportMissingImports]
import numpy as np
import torch

from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from dovetail_attention.flashinfer.backend import queries_indptr
from dovetail_attention.flashinfer.pages import PageRows, make_rows, pinned

if TYPE_CHECKING:
    from dovetail.types import Batch
    from dovetail_attention.config import FlashInferMLAConfig

LATENT, ROTATED = 512, 64
"""The sizes of latents and rotated keys for which there are kernels: those of DeepSeek-V2 and its descendants."""


class FlashInferLatent(AttentionBackend):
    """Attend in all rows of a batch in one call over latents, and in prompts that expand latents in one ragged call.

    Each call is planned before the first layer of a step, because a plan depends on the scale of the layer. For the
    copies of a plan see ``FlashInfer``.
    """

    def __init__(self, config: FlashInferMLAConfig, context: AttentionContext) -> None:
        if (context.head_dim, context.value_dim) != (LATENT + ROTATED, LATENT):
            raise ConfigError(
                f"attention flashinfer_mla has kernels for latents of {LATENT} numbers and rotated keys of {ROTATED}; this group has "
                f"head_dim {context.head_dim} and value_dim {context.value_dim}. Set attention to triton or torch_native"
            )
        self._context, self._pool = context, context.pool
        workspace = torch.zeros(config.workspace_mib << 20, dtype=torch.uint8, device=context.device)
        self._latents: Any = flashinfer.mla.BatchMLAPagedAttentionWrapper(workspace, backend=config.variant)
        self._ragged: Any = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=config.variant)
        self._copied = torch.cuda.Event()
        self._rows: tuple[torch.Tensor, PageRows]
        self._prompts: tuple[torch.Tensor, torch.Tensor]
        self._planned: float | None = None  # the scale for which the rows are planned
        self._planned_prompts: float | None = None

    def plan(self, batch: Batch) -> None:
        """Gather the pages of the rows."""
        self._copied.synchronize()
        kv_lens = batch.prefix_lens + batch.extend_lens
        queries = queries_indptr(batch, slice(None), self._context.device)
        self._rows = queries, make_rows(kv_lens, batch.page_table, self._pool.page_size)
        self._planned = None

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        context = self._context
        if self._planned != _scale_of(layer):
            queries, (indptr, _, kv_lens, indices) = self._rows
            kept = self._pool.keys(0).dtype
            sizes = context.num_heads, LATENT, ROTATED, self._pool.page_size
            self._latents.plan(
                queries, indptr, indices, kv_lens, *sizes, True, layer.scale, context.dtype, kept
            )  # True: causal
            self._copied.record()
            self._planned = layer.scale
        entries = self._pool.keys(layer.layer_id)[:, :, 0]
        return self._latents.run(
            q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous(), entries[..., :LATENT], entries[..., LATENT:]
        )

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        """See ``ExpandedAttention``."""
        self._copied.synchronize()
        device = self._context.device
        keys = np.zeros(len(batch.slots) + 1, np.int32)
        np.cumsum(batch.prefix_lens + batch.extend_lens, out=keys[1:])
        self._prompts = queries_indptr(batch, slice(None), device), pinned(keys, device)
        self._planned_prompts = None

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        """See ``ExpandedAttention``."""
        if self._planned_prompts != _scale_of(layer):
            heads, context = q.shape[1], self._context
            self._ragged.plan(
                *self._prompts,
                heads,
                heads,
                q.shape[2],
                head_dim_vo=v.shape[2],
                causal=True,
                sm_scale=layer.scale,
                q_data_type=context.dtype,
                kv_data_type=context.dtype,
            )
            self._copied.record()
            self._planned_prompts = layer.scale
        return self._ragged.run(q, k.contiguous(), v.contiguous())


def _scale_of(layer: AttentionLayer) -> float:
    """Return the scale of ``layer``. Raises ``ConfigError`` if it has what these kernels lack."""
    if layer.window is not None or layer.soft_cap is not None or layer.sinks is not None:
        raise ConfigError(
            "attention flashinfer_mla has neither windows nor soft caps nor sinks; set attention to triton"
        )
    return layer.scale

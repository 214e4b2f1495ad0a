"""Run FlashAttention-3 over latents (MLA), and over the keys and values that prompts expand latents to.

Over latents, its kernels take a query in two parts: ``q``, which meets the rotated keys (64 numbers), and ``qv``, which
meets the values, that is the latents themselves (512 numbers), so that a latent is read once as key and value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dovetail.errors import ConfigError
from dovetail_attention.config import TritonConfig
from dovetail_attention.flash_attn.backend import CallRows, FlashAttention
from dovetail_attention.flash_attn.providers import AttentionCall, RaggedCall, open_first, open_ragged
from dovetail_attention.triton.backend import TritonAttention

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.interfaces.attention import AttentionContext, AttentionLayer
    from dovetail.types import Batch
    from dovetail_attention.config import FlashAttnMLAConfig

LATENT, ROTATED = 512, 64
"""The sizes of latents and rotated keys for which there are kernels: those of DeepSeek-V2 and its descendants."""

LATENT_SPLITS, LATENT_TILE = 128, 64
"""The largest number of parts of a row's latents, and the number of pairs of a query and a head in one tile."""


TRITON = 1
"""The variant of decode steps that the kernels of backend ``triton`` compute."""
TRITON_HEADS, TRITON_ROWS, TRITON_KEYS = 16, 8, 1 << 17
"""The largest numbers of heads, of rows and of their keys together for which these were measured to be faster on H200."""


class FlashAttentionLatent(FlashAttention):
    """Attend over latents, in the same calls as ``FlashAttention``, and over expanded prompts in one ragged call.

    Decode steps of few rows and heads are computed by ``TritonAttention``, which is faster for them.
    """

    latents = True

    def __init__(self, config: FlashAttnMLAConfig, context: AttentionContext) -> None:
        if (context.head_dim, context.value_dim) != (LATENT + ROTATED, LATENT):
            raise ConfigError(
                f"attention flash_attn_mla has kernels for latents of {LATENT} numbers and rotated keys of {ROTATED}; this group has "
                f"head_dim {context.head_dim} and value_dim {context.value_dim}. Set attention to triton or torch_native"
            )
        super().__init__(config, context)
        self._attend_ragged = open_ragged(self.provider, config.library)
        self._expanded: tuple[torch.Tensor, int, int] | None = None
        self._triton = TritonAttention(TritonConfig(), context)
        self._uses_triton = False  # in the present plan

    def variant(self, batch: Batch) -> int:
        """Return ``TRITON`` for few rows and heads that share no prefix."""
        rows = len(batch.slots)
        keys = int(batch.prefix_lens.sum()) + rows
        return TRITON if self.has_variant(TRITON, rows) and keys <= TRITON_KEYS and batch.shared is None else 0

    def has_variant(self, variant: int, rows: int) -> bool:
        """See ``AttentionBackend.has_variant``."""
        return not variant or (self._heads <= TRITON_HEADS and rows <= TRITON_ROWS)

    def plan(self, batch: Batch) -> None:
        """See ``AttentionBackend.plan``. Copies nothing and does not wait for the device."""
        self._uses_triton = batch.variant == TRITON
        (self._triton if self._uses_triton else super()).plan(batch)

    def plan_capture(self, batch: Batch) -> None:
        """See ``FlashAttention.plan_capture``."""
        self._uses_triton = batch.variant == TRITON
        (self._triton if self._uses_triton else super()).plan_capture(batch)

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        """See ``AttentionBackend.forward``."""
        return (self._triton if self._uses_triton else super()).forward(q, layer, batch)

    def _token_bytes(self) -> int:
        """See ``FlashAttention._token_bytes``. A latent is read once, as key and value."""
        return self._head_dim * self._pool.keys(0).element_size()

    def _splits(self, rows: int) -> int:
        """See ``FlashAttention._splits``. The heads of a row are divided into tiles, each of which reads the row's latents."""
        return min(LATENT_SPLITS, max(1, self._processors // (rows * -(-self._heads // LATENT_TILE))))

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        """See ``ExpandedAttention``. Copies nothing and does not wait."""
        longest = int((batch.prefix_lens + batch.extend_lens).max())
        self._expanded = kv_indptr, int(batch.extend_lens.max()), longest

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        """See ``ExpandedAttention``."""
        assert self._expanded is not None, "plan_expanded comes before forward_expanded"
        indptr, max_q, max_k = self._expanded
        return self._attend_ragged(RaggedCall(q, k, v, batch.qo_indptr, indptr, max_q, max_k, layer.scale))

    def _call(
        self, q: torch.Tensor, layer: AttentionLayer, rows: CallRows, *, causal: bool, sinks: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer.window is not None or layer.soft_cap is not None or layer.sinks is not None:
            raise ConfigError(
                "attention flash_attn_mla has neither windows nor soft caps nor sinks; set attention to triton"
            )
        entries = self._pool.keys(layer.layer_id)
        return self._run(
            AttentionCall(
                q[..., LATENT:],
                entries[..., LATENT:],
                entries[..., :LATENT],
                rows.cu_q,
                rows.used_k,
                rows.table,
                rows.max_q,
                rows.max_k,
                layer.scale,
                causal,
                splits=rows.splits,
                qv=q[..., :LATENT],
            ),
            layer,
        )


def probe(section: FlashAttnMLAConfig, config: Config) -> str | None:
    """Return why no provider that ``section`` allows can be used on the current device, or None if one can."""
    capability = torch.cuda.get_device_capability()
    opened, reasons = open_first(capability, config.memory.page_size, section.provider, section.library, latents=True)
    return None if opened else "; ".join(reasons)

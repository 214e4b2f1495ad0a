"""Choose the steps in which prompts attend over expanded latents, and prepare them (see ``layers.latent``).

A head multiplies and adds for each pair of a query and a key it sees: absorbed, ``latent_dim + kv_lora_rank`` numbers
(1,088 in DeepSeek-V3); expanded, ``head_dim + v_head_dim`` numbers (320). To expand one latent costs
``kv_lora_rank * (qk_nope_head_dim + v_head_dim)`` (131,072). To absorb a query and to expand its result costs the same. So
decode rows absorb, and long chunks expand. A chunk after a long prefix expands the latents of the prefix again: this pays
from about 170 queries on in DeepSeek-V3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from dovetail.engine.build import as_module
from dovetail.engine.captures import NO_UPDATES
from dovetail.interfaces.features import Feature
from dovetail.layers.latent import ExpandedRows, LatentAttention
from dovetail.types import Batch, DraftTree

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.expanded import ExpandedAttention
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.layers.latent import LatentShape
    from dovetail.registry.resolver import Resolved

EXPANDED_BYTES = 1 << 30
"""The most memory that the expanded keys and values of one layer take. Steps with more keys absorb."""

OPERATIONS_OF_PIECES = 2e11
"""The number of operations per layer that expansion must save in a step that could run in captured pieces, which absorb:
as many as the device computes while the host launches one layer (see ``pieces.MORE_LAUNCH_SECONDS``)."""


class Expansion:
    """Choose and prepare the steps of one model whose prompts expand latents. ``heads`` is this rank's number of query
    heads."""

    def __init__(self, shape: LatentShape, heads: int, itemsize: int) -> None:
        expanded = shape.qk_nope_head_dim + shape.v_head_dim
        absorbed_pair, expanded_pair = shape.latent_dim + shape.kv_lora_rank, shape.head_dim + shape.v_head_dim
        self._saved_per_pair = 2 * heads * (absorbed_pair - expanded_pair)
        self._cost_per_key = 2 * heads * shape.kv_lora_rank * expanded
        numbers = 2 * shape.latent_dim + heads * (expanded + shape.head_dim)
        self._bytes_per_key = itemsize * numbers
        self.most_keys = EXPANDED_BYTES // self._bytes_per_key

    @classmethod
    def of(cls, resolved: Resolved, model: ModelArchitecture) -> Expansion | None:
        """Return the choice for ``model``, or None if it has no latent attention, several cache groups, or layers of
        different shapes, or values wider than keys, or if its attention backend for prompts does not offer
        ``attention.expanded``."""
        if Feature.ATTN_EXPANDED not in resolved.attention_prefill.spec.offers or resolved.config.batch_invariant:
            return None
        layers = [module for module in as_module(model).modules() if isinstance(module, LatentAttention)]
        if not layers or len(model.info.cache_groups) > 1 or any(layer.shape != layers[0].shape for layer in layers):
            return None
        shape = layers[0].shape
        if shape.v_head_dim > shape.head_dim:
            return None
        return cls(shape, layers[0].num_heads, getattr(torch, resolved.config.model.dtype).itemsize)

    def needed_bytes(self, most_keys: int) -> int:
        """Return the bytes that a step takes to expand latents, if its prompts never have more than ``most_keys`` keys."""
        return min(self.most_keys, most_keys) * self._bytes_per_key

    def pays(self, batch: Batch, *, in_pieces: bool = False) -> bool:
        """Return True if the prompts of ``batch`` should expand the latents of their rows. With ``in_pieces``, the step
        could otherwise run in captured pieces."""
        queries = batch.extend_lens[: batch.num_extend].astype(np.int64)
        prefixes = batch.prefix_lens[: batch.num_extend].astype(np.int64)
        if int((queries + prefixes).sum()) > self.most_keys:
            return False
        pairs = int((queries * prefixes + queries * (queries + 1) // 2).sum())
        saved = pairs * self._saved_per_pair - int(prefixes.sum()) * self._cost_per_key
        return saved > (OPERATIONS_OF_PIECES if in_pieces else 0)

    def plan(self, batch: Batch, prefill: AttentionBackend, decode: AttentionBackend, page_size: int) -> None:
        """Set ``batch.expanded`` of a prepared batch with prompts, and plan its rows: prompts with ``prefill``, which
        offers ``attention.expanded``, other rows with ``decode``."""
        split, rows = batch.num_extend, len(batch.slots)
        tokens = int(batch.extend_lens[:split].sum())
        prompts = batch if split == rows else _part(batch, slice(split), slice(tokens))
        indptr, locations = _locations(prompts, page_size)
        expanded = cast("ExpandedAttention", prefill)
        expanded.plan_expanded(prompts, indptr)
        rest = None
        if split < rows:
            rest = _part(batch, slice(split, rows), slice(tokens, None))
            if rest.drafts is None:
                rest.variant = decode.variant(rest)
            decode.plan(rest)
            rest.attn = (decode,)
        batch.expanded = ExpandedRows(prompts, expanded, tokens, locations, rest)


def _locations(rows: Batch, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``kv_indptr`` (int32 ``[rows + 1]``) and the pool's locations of all tokens of each row, one row after the
    other (int64 ``[keys]``). Does not wait for the device."""
    lens, device = rows.kv_lens, rows.kv_lens.device
    keys = int((rows.prefix_lens.astype(np.int64) + rows.extend_lens).sum())
    indptr = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
    torch.cumsum(lens, 0, dtype=torch.int32, out=indptr[1:])
    row_of = torch.repeat_interleave(torch.arange(len(lens), device=device), lens, output_size=keys)
    places = torch.arange(keys, device=device) - indptr[row_of]
    pages = rows.page_table[row_of, places // page_size].long()
    return indptr, pages * page_size + places % page_size


def _part(batch: Batch, rows: slice, tokens: slice) -> Batch:
    """Return some consecutive rows of a prepared batch, and their tokens."""
    drafts = batch.drafts
    part = Batch(
        reqs=(),
        num_extend=len(range(*rows.indices(batch.num_extend))),
        slots=batch.slots[rows],
        prefix_lens=batch.prefix_lens[rows],
        extend_lens=batch.extend_lens[rows],
        samples=batch.samples[rows],
        page_updates=NO_UPDATES,
    )
    if drafts is not None and not part.num_extend:
        part.drafts = DraftTree(drafts.token_ids[rows], drafts.parents[rows], drafts.lens[rows])
        part.tree_mask = None if batch.tree_mask is None else batch.tree_mask[tokens]
    part.kv_lens, part.page_table = batch.kv_lens[rows], batch.page_table[rows]
    part.input_ids, part.positions, part.out_loc = (
        batch.input_ids[tokens],
        batch.positions[tokens],
        batch.out_loc[tokens],
    )
    first = rows.start or 0
    part.qo_indptr = batch.qo_indptr[first : first + len(part.slots) + 1] - batch.qo_indptr[first]
    part.kv = ()
    return part

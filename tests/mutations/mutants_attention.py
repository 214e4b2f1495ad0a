"""Define broken attention backends: plain torch with one defect each."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from mutant import Mutant

from dovetail.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, ProjectedRows
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature
from dovetail.registry.specs import ComponentKind, ComponentSpec
from dovetail.testing.attention import AttentionSuite
from dovetail.types import Batch

GRAPHS = {Feature.ATTN_GRAPH, Feature.ATTN_VERIFY_GRAPH}
OFFERS = frozenset(Feature(feature.name) for feature in BUILT_IN_FEATURES if feature.namespace == "attention") - GRAPHS


class Flawed(AttentionBackend):
    """Attend row by row with dense matrices; ``flaw`` names the defect."""

    def __init__(self, context: AttentionContext, flaw: str = "") -> None:
        self.pool, self.flaw, self.invariant = context.pool, flaw, context.batch_invariant

    def plan(self, batch: Batch) -> None:
        self.window: int | None = -1
        if self.flaw != "ignores later plans" or not hasattr(self, "batch"):
            self.batch = batch

    def forward(self, q: torch.Tensor, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        if self.flaw == "adds to q":
            q += 1
        if self.flaw == "takes q to be contiguous":
            q = torch.as_strided(q, q.shape, (q.shape[1] * q.shape[2], q.shape[2], 1))
        if self.flaw == "keeps the first layer's window":
            self.window = layer.window if self.window == -1 else self.window
            layer = replace(layer, window=self.window)
        out = q.new_empty(*q.shape[:2], self.pool.values(layer.layer_id).shape[3])
        for row, (start, end) in enumerate(zip(batch.qo_indptr.tolist(), batch.qo_indptr[1:].tolist(), strict=False)):
            length = int(self.batch.kv_lens[row])
            if self.invariant:  # sums of equally many terms have the same order
                for token in range(start, end):
                    out[token] = self.attend(row, slice(token, token + 1), q, layer, length - end + token + 1)[0]
            else:
                out[start:end] = self.attend(row, slice(start, end), q, layer, length)
        if self.flaw == "lets padding rows change other rows":
            out += 0 * out.sum(0)
        if self.flaw == "writes to the pool":
            self.pool.keys(layer.layer_id)[1] = 0
        return out.float() if self.flaw == "returns float32" else out

    def forward_projected(self, rows: ProjectedRows, layer: AttentionLayer, batch: Batch) -> torch.Tensor:
        keys, values = (read(layer.layer_id).flatten(0, 1) for read in (self.pool.keys, self.pool.values))
        *heads, v = rows.qkv.float().tensor_split([rows.qkv.shape[1] - 2 * keys.shape[1], -keys.shape[1]], 1)
        if rows.norm is not None and self.flaw != "does not normalise":
            scales = [torch.rsqrt(x.square().mean(-1, keepdim=True) + rows.norm[2]) for x in heads]
            heads = [x * scale * weight for x, scale, weight in zip(heads, scales, rows.norm, strict=False)]
        at = rows.positions[:1] if self.flaw == "rotates all rows as the first" else rows.positions
        cos, sin = rows.table[at][:, :, None].unbind(1)
        half = rows.qkv.shape[2] // 2
        q, k = (x * cos + x.roll(1 if self.flaw == "pairs adjacent elements" else half, -1) * sin for x in heads)
        if self.flaw != "does not store its key":
            keys[rows.out_loc] = k.to(keys.dtype)
        values[rows.out_loc] = v.to(values.dtype)
        return self.forward(q.to(rows.qkv.dtype), layer, batch)

    def plan_expanded(self, batch: Batch, kv_indptr: torch.Tensor) -> None:
        self.kv_starts = kv_indptr.tolist()

    def forward_expanded(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer, batch: Batch
    ) -> torch.Tensor:
        parts = []
        for row, (start, end) in enumerate(zip(self.kv_starts, self.kv_starts[1:], strict=False)):
            first, last = batch.qo_indptr[row : row + 2].tolist()
            before = 0 if self.flaw == "takes a chunk for a whole prompt" else end - start - (last - first)
            later = torch.ones(last - first, end - start, dtype=torch.bool).triu(before + 1)
            scores = layer.scale * torch.einsum("qhd,khd->hqk", q[first:last].float(), k[start:end].float())
            weights = scores.masked_fill(later, float("-inf")).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, v[start:end].float()))
        return torch.cat(parts).to(q.dtype)

    def attend(self, row: int, tokens: slice, q: torch.Tensor, layer: AttentionLayer, length: int) -> torch.Tensor:
        q, batch, flaw = q[tokens], self.batch, self.flaw
        places = self.places(row, length)
        layer_id = 0 if flaw == "reads layer 0" else layer.layer_id
        if flaw == "reads the tail of the page":
            places = self.places(row, -(-length // self.pool.page_size) * self.pool.page_size)
        k, v = self.read(layer_id, places, q.dtype)
        if flaw == "takes the last numbers of a latent for its values":
            v = k[..., -v.shape[2] :]
        if flaw == "rounds queries to the pool's dtype":
            q = q.to(self.pool.keys(layer_id).dtype).to(q.dtype)
        group = q.shape[1] // k.shape[1]
        k, v = (self.per_query_head(x, group) for x in (k, v))
        seen = self.seen(row, tokens, len(places), length, layer)
        if batch.shared is not None and layer.window is not None:
            v = torch.where(seen.any(0)[:, None, None], v, 0)  # pages behind the window may be gone
        scale = q.shape[-1] ** -0.5 if flaw == "knows one scale" else layer.scale
        if flaw == "rounds depending on the size of the batch":
            scale *= 1 + 1e-6 * len(batch.reqs)
        if flaw == "rounds depending on the number of queries":
            scale *= 1 + 1e-7 * int(batch.extend_lens[row])
        scale *= 1.1 if self.is_large(row, tokens, q, layer, length) else 1
        scores = scale * torch.einsum("qhd,khd->hqk", q.float(), k)
        if layer.soft_cap is not None and flaw != "no soft cap":
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        if layer.soft_cap is not None and flaw == "caps what is masked":
            scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
        return torch.einsum("hqk,khd->qhd", self.softmax(scores, q.dtype, layer), v).to(q.dtype)

    def read(self, layer_id: int, places: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values at ``places``, multiplied by their scales."""
        keys, values, scales = self.pool.tensors(layer_id)
        k, v = (memory.flatten(0, 1)[places].float() for memory in (keys, values))
        if scales is None or self.flaw == "ignores scales":
            return k, v
        own = [part.flatten(0, 1)[places].float()[..., None] for part in scales]
        if self.flaw == "knows one scale for all heads":
            own = [part[:, :1] for part in own]
        if self.flaw == "multiplies values by the scales of keys":
            own[1] = own[0]
        if self.flaw == "multiplies in 16 bits":
            return k * own[0], (v.to(dtype) * own[1].to(dtype) / 256).float() * 256
        return k * own[0], v * own[1]

    def is_large(self, row: int, tokens: slice, q: torch.Tensor, layer: AttentionLayer, length: int) -> bool:
        """Return True if the row has the size at which ``flaw`` begins."""
        return {
            "is wrong for more than 64 rows": len(self.batch.reqs) > 64,
            "is wrong beyond 4,000 tokens": length > 4000,
            "is wrong in chunks of 512 tokens": tokens.stop - tokens.start == 512,
            "is wrong for page ids over 4,096": int(self.batch.page_table[row].max()) > 4096,
            "is wrong in layer 3": layer.layer_id == 3,
            "is wrong at head_dim 256": q.shape[-1] == 256,
        }.get(self.flaw, False)

    def places(self, row: int, length: int) -> torch.Tensor:
        table, size = self.pages(row).long(), self.pool.page_size
        places = torch.arange(length)
        if self.flaw == "assumes that pages are consecutive":
            return table[0] * size + places
        if self.flaw == "is off by one in its short cut" and len(table) > 1 and table[1] == table[0] + 1:
            return table[0] * size + places + 1
        return table[places // size] * size + places % size

    def pages(self, row: int) -> torch.Tensor:
        shared, table = self.batch.shared, self.batch.page_table
        if self.flaw == "reads a foreign page" and row:
            return torch.where(table[row] == table[0, 0], table[row, 1], table[row])
        if shared is None or self.flaw == "ignores shared prefixes":
            return self.batch.page_table[row]
        group = 0 if self.flaw == "knows one group" else int((shared.indptr <= row).sum()) - 1
        count = int(shared.group_lens[group]) // self.pool.page_size
        self.first_position = None if shared.window is None else int(shared.first_positions[group])
        return torch.cat([shared.group_table[group, :count], shared.own_table[row]])

    def per_query_head(self, x: torch.Tensor, group: int) -> torch.Tensor:
        if self.flaw == "assigns query heads to the wrong key heads":
            return x.repeat(1, group, 1)
        return x.repeat_interleave(group, 1)

    def seen(self, row: int, tokens: slice, keys: int, length: int, layer: AttentionLayer) -> torch.Tensor:
        batch, flaw = self.batch, self.flaw
        position = batch.positions[tokens, None]
        key, prefix = torch.arange(keys), length - len(position)
        seen = key <= position + int(flaw == "one key too many")
        if flaw == "one key too few":
            seen = key < position.clamp(min=1)
        if flaw == "loses a part of long rows" and keys > 200:
            seen = seen & (key >= 64)
        if flaw == "causal from the top left":
            seen = key <= position - prefix
        if batch.tree_mask is not None and flaw != "no tree mask":
            seen = seen | (key >= prefix)
            own = slice(prefix, length)
            seen[:, own] = batch.tree_mask[tokens, : len(position)]
        if layer.window is None or flaw == "no window":
            return seen & (key < length)
        place = key.clone()
        shared = length - int(batch.shared.own_lens[row]) if batch.shared is not None else 0
        if flaw == "no window in what is shared":
            return seen & ((key < shared) | (key > position - layer.window))
        if flaw == "takes all rows for the shortest" and shared:
            position = torch.where(key < shared, self.first_position, position)
        if flaw != "windows count places":
            place[prefix:length] = batch.positions[tokens]
        return seen & (key < length) & (place > position - layer.window - int(flaw == "window one too wide"))

    def softmax(self, scores: torch.Tensor, dtype: torch.dtype, layer: AttentionLayer) -> torch.Tensor:
        if self.flaw == "softmax in 16 bits":
            scores = scores.to(dtype)
        top = 0 if self.flaw == "subtracts no maximum" else scores.amax(-1, keepdim=True)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        if layer.sinks is not None and self.flaw != "no sinks":
            count = 2 if self.flaw == "counts a sink twice" and self.batch.shared is not None else 1
            total = total + count * torch.exp(layer.sinks[:, None, None] - top)
        return (weights / total).float()


class Sound(AttentionSuite):
    name = "sound"
    flaw = ""
    offered = OFFERS

    @property
    def spec(self) -> ComponentSpec:
        return ComponentSpec(ComponentKind.ATTENTION, self.name, "", "", "", offers=self.offered)

    def make(self, context: AttentionContext) -> AttentionBackend:
        return Flawed(context, self.flaw)


class Short(Sound):
    """Long rows are no longer than they must be."""

    longest = 300


def flawed(flaw: str, base: type[Sound] = Sound) -> Sound:
    """Return the suite of the backend with this defect."""
    suite = base()
    suite.flaw = flaw
    return suite


def _of(flaw: str, case: str, *arguments: Any, fault: str = "", says: str = "", base: type[Sound] = Sound) -> Mutant:
    return Mutant(fault or flaw, case, functools.partial(flawed, flaw, base), base, [arguments], says)


PHASES = "test_phases_and_page_sizes"
WRONG = "is allowed in torch"
POISON = "NaN from pool places that belong to no row"
E5M2, BF16 = "fp8_e5m2", torch.bfloat16

MUTANTS = [
    _of("one key too many", PHASES, "extend", 4, fault="sees one key too many"),
    _of("one key too few", PHASES, "decode", 16, fault="sees one key too few", says=WRONG),
    _of(
        "causal from the top left",
        PHASES,
        "extend after a prefix",
        1,
        fault="aligns the causal mask with the first key",
        says=WRONG,
    ),
    _of("assumes that pages are consecutive", PHASES, "decode", 4),
    _of("reads the tail of the page", PHASES, "decode", 16, fault="reads the tail of a page", says=POISON),
    _of("reads layer 0", PHASES, "decode one row", 1, fault="reads another layer", says=POISON),
    _of("no tree mask", PHASES, "trees and extend", 4, fault="ignores the tree mask", says=WRONG),
    _of("adds to q", PHASES, "decode", 1, fault="writes to its queries"),
    _of("writes to the pool", PHASES, "decode", 1),
    _of(
        "reads a foreign page",
        "test_rows_that_share_pages",
        4,
        [64, 70, 130, 64, 99, 30],
        [1] * 6,
        (Feature.ATTN_DECODE,),
        1,
    ),
    _of(
        "is off by one in its short cut",
        "test_consecutive_pages",
        "decode",
        fault="is off by one where pages follow each other",
    ),
    _of("returns float32", "test_dtypes", "decode", BF16),
    _of("rounds queries to the pool's dtype", "test_fp8_pools", "decode", E5M2, torch.float32, says=WRONG),
    _of(
        "loses a part of long rows",
        "test_long_rows_of_fp8_pools",
        E5M2,
        base=Short,
        fault="loses a part of long rows of 8 bits",
    ),
    _of(
        "ignores shared prefixes",
        "test_shared_prefixes_of_fp8_pools",
        "one group",
        E5M2,
        fault="ignores shared prefixes of 8 bits",
    ),
    _of("ignores scales", "test_scales", "decode", "token_head", says=WRONG),
    _of("knows one scale for all heads", "test_scales", "mixed", "head", says=WRONG),
    _of("ignores scales", "test_scales_of_latents", "mixed", fault="ignores scales of latents", says=WRONG),
    _of(
        "ignores scales",
        "test_scales_of_latents_in_16_bits",
        BF16,
        fault="ignores scales of latents in 16 bits",
        says=WRONG,
    ),
    _of("multiplies in 16 bits", "test_scales_in_16_bits", "token_head", torch.float16, says=WRONG),
    _of(
        "loses a part of long rows",
        "test_long_rows_of_scales",
        "head",
        base=Short,
        fault="loses a part of long rows with scales",
    ),
    _of("multiplies values by the scales of keys", "test_shared_prefixes_with_scales", "one group", says=WRONG),
    _of(
        "ignores scales",
        "test_windows_caps_and_sinks_with_scales",
        "token_head",
        fault="ignores scales under a cap",
        says=WRONG,
    ),
    _of("assigns query heads to the wrong key heads", "test_grouped_heads", "decode", 8, 4, says=WRONG),
    _of("knows one scale", "test_head_dims", "decode", 16, fault="ignores the layer's scale", says=WRONG),
    *(
        _of(flaw, case, *arguments, says=WRONG)
        for flaw, case, arguments in (
            ("is wrong for more than 64 rows", "test_many_rows_of_a_large_pool", [None]),
            ("is wrong beyond 4,000 tokens", "test_many_rows_of_a_large_pool", [None]),
            ("is wrong for page ids over 4,096", "test_many_rows_of_a_large_pool", [None]),
            ("is wrong in layer 3", "test_many_rows_of_a_large_pool", [None]),
            ("is wrong in chunks of 512 tokens", "test_a_chunk_of_512_tokens", []),
            ("is wrong at head_dim 256", "test_head_dims", ["decode", 256]),
        )
    ),
    *(
        _of("takes the last numbers of a latent for its values", case, *arguments, says=WRONG)
        for case, arguments in (("test_latents", ["decode", 24, 16]), ("test_latents_of_16_bits", ["decode", BF16]))
    ),
    _of(
        "rounds queries to the pool's dtype",
        "test_latents_of_8_bits",
        E5M2,
        fault="rounds queries over latents to the pool's dtype",
        says=WRONG,
    ),
    _of(
        "ignores shared prefixes",
        "test_shared_prefixes_of_latents",
        "one group",
        fault="ignores shared prefixes of latents",
    ),
    _of(
        "loses a part of long rows",
        "test_long_rows_of_latents",
        base=Short,
        fault="loses a part of long rows of latents",
    ),
    _of(
        "takes a chunk for a whole prompt",
        "test_prompts_over_expanded_latents",
        "extend after a prefix",
        24,
        16,
        torch.float32,
        says="difference of",
    ),
    _of("no window", "test_sliding_window", "decode", 16, fault="ignores the sliding window", says=WRONG),
    _of("window one too wide", "test_sliding_window", "extend", 16, fault="sees one key beyond the window", says=WRONG),
    _of("windows count places", "test_sliding_window", "trees", 1, fault="counts nodes of a tree instead of depths"),
    _of("no soft cap", "test_soft_cap", "extend", fault="ignores the soft cap", says=WRONG),
    _of("no sinks", "test_sinks", "decode one row", fault="ignores the sinks", says=WRONG),
    _of(
        "caps what is masked",
        "test_window_soft_cap_and_sinks_together",
        "extend",
        fault="applies the soft cap after the mask",
    ),
    _of("subtracts no maximum", "test_softmax_in_float32", "decode", torch.float32, 50.0),
    _of(
        "softmax in 16 bits",
        "test_softmax_in_float32",
        "extend after a prefix",
        BF16,
        6.0,
        fault="computes the softmax in 16 bits",
    ),
    _of("lets padding rows change other rows", "test_padding_rows_change_no_other_row", "decode", says=POISON),
    _of("ignores shared prefixes", "test_shared_prefixes", "one group", 4),
    _of(
        "knows one group",
        "test_shared_prefixes",
        "groups and single rows",
        16,
        fault="uses only the first group of shared prefixes",
    ),
    _of(
        "assigns query heads to the wrong key heads",
        "test_shared_prefixes_of_grouped_heads",
        "one group",
        torch.float32,
        8,
        2,
        fault="assigns query heads of shared prefixes to the wrong key heads",
    ),
    _of("counts a sink twice", "test_shared_prefixes_with_soft_cap_and_sinks", "one group", says=WRONG),
    _of(
        "subtracts no maximum",
        "test_shared_prefixes_of_large_logits",
        "one group",
        fault="overflows when results are merged with a shared prefix",
    ),
    _of("loses a part of long rows", "test_long_shared_prefixes", fault="loses a part of long shared prefixes"),
    _of(
        "no window in what is shared",
        "test_shared_prefixes_in_windows",
        "groups and single rows",
        20,
        fault="ignores windows in shared prefixes",
    ),
    _of(
        "takes all rows for the shortest",
        "test_shared_prefixes_in_windows",
        "groups and single rows",
        20,
        fault="gives all rows of a group the window of the shortest",
        says=WRONG,
    ),
    _of(
        "loses a part of long rows",
        "test_long_shared_prefixes_in_windows",
        650,
        fault="loses a part of long shared prefixes in windows",
    ),
    _of(
        "loses a part of long rows",
        "test_chunk_after_a_large_prefix",
        None,
        True,
        fault="loses a part of a chunk's prefix",
    ),
    _of("loses a part of long rows", "test_decode_rows_of_very_different_lengths", False),
    _of("ignores later plans", "test_plans_leave_nothing_behind"),
    _of("keeps the first layer's window", "test_layers_of_one_step_may_differ"),
    _of(
        "takes q to be contiguous",
        "test_queries_may_be_a_slice_of_a_fused_projection",
        fault="assumes that queries are contiguous",
    ),
    _of(
        "pairs adjacent elements",
        "test_projected_rows",
        (700,),
        True,
        fault="rotates adjacent elements",
        says="key or value",
    ),
    _of("does not normalise", "test_projected_rows", (64,), True, fault="ignores norms", says="key or value"),
    _of("does not store its key", "test_projected_rows", (1,), False, says="key or value"),
    _of("rotates all rows as the first", "test_projected_rows", (700, 0, 65, 300), False, says="key or value"),
    _of(
        "rounds depending on the size of the batch",
        "test_batch_invariance",
        "decode",
        says="has other bits in a batch with other rows",
    ),
    _of(
        "rounds depending on the number of queries",
        "test_batch_invariance_of_divided_rows",
        150,
        "pages of 4",
        says="have other bits than in one prompt",
    ),
]

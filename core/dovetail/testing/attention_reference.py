"""Compute attention by its definition, one query at a time in float64, and build the steps that backends are compared
on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionContext, AttentionLayer
from dovetail.interfaces.cache import CacheGroup, CacheGroupKind
from dovetail.interfaces.store import KVStore
from dovetail.memory.pool import PagedKVPool, make_pool
from dovetail.memory.scaled import ScaledKVPool, ScaledLatentPool
from dovetail.ops.kv_dtypes import raw
from dovetail.testing.batches import make_batch, make_page_table, share_prefixes
from dovetail.types import DraftTree, IntArray

TOLERANCES = {torch.float32: 3e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""The allowed difference, times (1 + |value|). Queries, keys and values are standard normal. In 16 bits the
probabilities and the output may each be rounded once (bfloat16 keeps 8 bits, float16 11); logits and sums may not be
rounded."""


@dataclass(frozen=True)
class AttentionCase:
    """Describe one step: row r has ``prefix[r]`` tokens in the pool, and ``extend[r]`` tokens enter.

    ``trees`` are the parents of the drafts of the rows from ``num_extend`` on. The last ``padding`` rows have no pages
    and point at page 0. Rows with a prefix of at least ``shared`` tokens (a multiple of the page size) share the pages
    of these tokens. With ``groups``, the (rows, tokens) of each group from row 0 on, the batch states what rows share,
    rounded down to whole pages; rows after the last group share nothing.
    """

    prefix: Sequence[int]
    extend: Sequence[int]
    num_extend: int | None = None
    trees: Sequence[Sequence[int]] | None = None
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 4
    scale: float | None = None
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    blocks: bool = False  # chains whose queries see all of their row's queries
    padding: int = 0
    shared: int = 0
    groups: Sequence[tuple[int, int]] | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # of the pool; None: dtype
    scales: str | None = None  # of a pool of 8 bits: "token_head", or "head" for fixed ones
    value_dim: int | None = None  # the values are this number of first elements of the keys; None: a separate tensor
    key_scale: float = 1.0
    value_scale: float = 1.0
    ordered_pages: bool = False
    batch_invariant: bool = False
    seed: int = 0
    layer_id: int = 1
    num_layers: int = 2
    min_pages: int = 0  # of the pool, which has more pages than the rows need


class AttentionStep:
    """Build a case on a device: a pool that is NaN except for the tokens of its rows, the batch, the queries, and the
    layer.

    If ``whole`` is given, the step uses the pool and the pages of ``whole``, which must have at least as many rows, none
    of them shorter.
    """

    def __init__(self, case: AttentionCase, device: torch.device, whole: AttentionStep | None = None) -> None:
        self.case = case
        self.device = device
        self._random = torch.Generator().manual_seed(case.seed)
        self.lens = [a + b for a, b in zip(case.prefix, case.extend, strict=True)]
        owned = self.lens[: len(self.lens) - case.padding]
        needed = max(case.min_pages, 8 + sum(-(-n // case.page_size) for n in owned))
        self.num_pages = whole.num_pages if whole else needed
        # Rows of padding point at page 0, and so do unused columns: a table may be wider than any row needs.
        self.table = self._make_table(owned, whole)
        self.pool = whole.pool if whole else self._make_pool(owned)
        self.drafts = None if case.trees is None else self._make_drafts(case.trees)
        self.batch = make_batch(
            case.page_size,
            self.table,
            case.prefix,
            case.extend,
            num_extend=case.num_extend,
            drafts=self.drafts,
            device=device,
        )
        if case.blocks:
            inside = np.arange(max(case.extend)) < np.repeat(case.extend, case.extend)[:, None]
            self.batch.tree_mask = torch.from_numpy(inside).to(device)
        if case.groups is not None:
            share_prefixes(self.batch, self.table, *self._groups(len(owned)), case.page_size, case.window)
        self.q = self._normal(sum(case.extend), case.heads, case.head_dim).to(device, case.dtype)
        sinks = self._normal(case.heads).to(device) if case.sinks else None
        scale = case.head_dim**-0.5 if case.scale is None else case.scale
        self.layer = AttentionLayer(case.layer_id, scale, case.window, case.soft_cap, sinks)

    @property
    def other_layer(self) -> AttentionLayer:
        """Return a layer of the same kind, for which the pool holds nothing."""
        return replace(self.layer, layer_id=(self.layer.layer_id + 1) % self.case.num_layers)

    def context(self, pool: KVStore | None = None) -> AttentionContext:
        """Return the context that a backend for this step is built with."""
        case = self.case
        return AttentionContext(
            device=self.device,
            dtype=case.dtype,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            pool=pool or self.pool,
            max_rows=max(16, len(case.prefix)),
            max_context=max(2048, *self.lens),
            batch_invariant=case.batch_invariant,
            value_dim=case.value_dim,
        )

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._random)

    def _make_table(self, owned: Sequence[int], whole: AttentionStep | None) -> IntArray:
        case, rows = self.case, len(owned)
        if whole is not None:
            table = whole.table[: len(case.prefix)].copy()
            table[rows:] = 0
        else:
            seed = None if case.ordered_pages else case.seed
            table = make_page_table(owned, case.page_size, self.num_pages, seed=seed)
            table = np.pad(table, ((0, case.padding), (0, 3)))
        assert case.shared % case.page_size == 0
        sharing = [row for row in range(rows) if case.prefix[row] >= case.shared]
        table[sharing, : case.shared // case.page_size] = table[sharing[:1], : case.shared // case.page_size]
        starts, lens = self._groups(rows)
        for start, stop, length in zip(starts, starts[1:], lens, strict=False):
            table[start:stop, : length // case.page_size] = table[start, : length // case.page_size]
        return table

    def _groups(self, rows: int) -> tuple[list[int], list[int]]:
        """Return ``starts`` and ``lens`` of ``SharedPrefixes``."""
        groups = list(self.case.groups or ())
        groups += [(1, 0)] * (rows - sum(size for size, _ in groups))
        starts = np.cumsum([0, *(size for size, _ in groups)])
        return starts.tolist(), [length // self.case.page_size * self.case.page_size for _, length in groups]

    def _make_pool(self, owned: Sequence[int]) -> PagedKVPool:
        case = self.case
        kind = CacheGroupKind.FULL if case.value_dim is None else CacheGroupKind.LATENT
        group = CacheGroup(case.num_layers, case.kv_heads, case.head_dim, kind, value_dim=case.value_dim)
        sizes, dtype = (group, self.num_pages, case.page_size), case.kv_dtype or case.dtype
        if case.scales is None:
            pool = make_pool(*sizes, dtype, self.device)
        elif case.value_dim is not None:
            pool = ScaledLatentPool(*sizes, dtype, self.device)
        else:
            pool = ScaledKVPool(*sizes, dtype, self.device, computed=case.scales == "token_head")
        pool.poison()
        if case.scales == "head":
            for layer_id in range(case.num_layers):
                k_scales, v_scales = ((0.1 * self._normal(case.kv_heads)).exp() / 64 for _ in range(2))
                pool.load_scales(layer_id, k_scales, v_scales * case.value_scale)
        for row, length in enumerate(owned):
            places = row_places(self.table[row], length, case.page_size).to(self.device)
            k, v = (self._normal(length, case.kv_heads, case.head_dim) for _ in range(2))
            pool.store(
                case.layer_id, (k * case.key_scale).to(self.device), (v * case.value_scale).to(self.device), places
            )
        return pool

    def _make_drafts(self, trees: Sequence[Sequence[int]]) -> DraftTree:
        rows, width = len(self.lens), max(len(parents) for parents in trees)
        first = rows - len(trees)
        parents, lens = np.full((rows, width), -1, np.int32), np.zeros(rows, np.int32)
        for row, own in enumerate(trees, start=first):
            parents[row, : len(own)] = own
            lens[row] = len(own)
        return DraftTree(np.zeros((rows, width), np.int32), parents, lens)


def row_places(pages: np.ndarray, length: int, page_size: int) -> torch.Tensor:
    """Return the pool's places of the first ``length`` tokens of a row: int64 ``[length]``."""
    tokens = np.arange(length)
    return torch.from_numpy(pages[tokens // page_size].astype(np.int64) * page_size + tokens % page_size)


def visible(step: AttentionStep, row: int, query: int) -> np.ndarray:
    """Return the keys of its row that the ``query``-th new token sees, by the definition."""
    prefix = int(step.batch.prefix_lens[row])
    depth = query
    own = own_depth = np.arange(step.case.extend[row] if step.case.blocks else query + 1)
    if not step.case.blocks and step.drafts is not None and row >= step.batch.num_extend:
        own = np.array(_path(step.drafts, row, query))
        own_depth, depth = np.arange(len(own)), len(own) - 1
    keys = np.concatenate([np.arange(prefix), prefix + own])
    positions = np.concatenate([np.arange(prefix), prefix + own_depth])
    return keys if step.layer.window is None else keys[positions > prefix + depth - step.layer.window]


def _path(drafts: DraftTree, row: int, query: int) -> list[int]:
    """Return the path from the root of a row's tree to one of its nodes."""
    path = [query]
    while path[0] > 0:
        path.insert(0, 1 + int(drafts.parents[row, path[0] - 1]))
    return path


def output_shape(step: AttentionStep) -> tuple[int, ...]:
    """Return the shape of the output: the shape of the queries, with the size of the values as the last one."""
    return *step.q.shape[:2], step.case.value_dim or step.case.head_dim


def reference(step: AttentionStep) -> torch.Tensor:
    """Return the output ``[tokens, heads, head_dim of values]`` in float64 on the CPU. It is NaN for rows of
    padding."""
    case, batch = step.case, step.batch
    out = torch.full(output_shape(step), torch.nan, dtype=torch.float64)
    token = 0
    for row, count in enumerate(batch.extend_lens.tolist()):
        if row >= len(batch.reqs) - case.padding:
            break
        places = row_places(step.table[row], step.lens[row], case.page_size)
        k, v = stored(step.pool, case.layer_id, places)
        for query in range(count):
            seen = torch.from_numpy(visible(step, row, query))
            out[token] = _attend_one(step.q[token].cpu().double(), k[seen], v[seen], step.layer)
            token += 1
    return out


def stored(pool: KVStore, layer_id: int, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values at the locations ``places`` as they were stored, with their scales: float64
    ``[places, kv_heads, head_dim]`` each, on the CPU."""
    keys, values, scales = pool.tensors(layer_id)
    k, v = (_picked(memory, places) for memory in (keys, values))
    if scales is not None:
        k, v = (x * _picked(own, places)[..., None] for x, own in zip((k, v), scales, strict=True))
    return k, v


def _picked(memory: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Return what ``memory [pages, page_size, ...]`` holds at ``places``, in float64 on the CPU. The device picks it, because a
    pool may be large."""
    return raw(memory).flatten(0, 1)[places.to(memory.device)].view(memory.dtype).cpu().double()


def _attend_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """Return ``[heads, head_dim of values]`` of one query ``[heads, head_dim]`` over ``[keys, kv_heads, ...]``. Each head
    of K and V serves neighbouring heads of the query."""
    groups = q.unflatten(0, (k.shape[1], -1))
    scores = layer.scale * torch.einsum("hgd,khd->khg", groups, k).flatten(1)  # [keys, heads]
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    weights = torch.exp(scores)
    total = weights.sum(0)
    if layer.sinks is not None:
        total = total + torch.exp(layer.sinks.cpu().double())
    out = torch.einsum("khg,khd->hgd", weights.unflatten(1, groups.shape[:2]), v)
    return out.flatten(0, 1) / total[:, None]


def poisoned_equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return True if both have the same numbers and NaN in the same places."""
    left, right = left.float(), right.float()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())

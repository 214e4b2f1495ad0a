"""Build batches without an engine: set from lengths what ``Scheduler.schedule`` and ``Inputs.prepare`` would set."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dovetail.engine.grouped import set_views
from dovetail.sampling_params import SamplingParams
from dovetail.types import AdmittedRequest, Attends, Batch, DraftTree, IntArray, PageUpdates, SharedPrefixes, StoresKV


def make_page_table(lens: Sequence[int], page_size: int, num_pages: int, *, seed: int | None = 0) -> IntArray:
    """Return disjoint pages for rows of ``lens`` tokens: int32 ``[rows, pages of the longest row]``, padded with page
    0.

    With a seed, the pages are scattered over the pool. With ``seed=None`` they are consecutive, from page 1.
    """
    counts = [-(-length // page_size) for length in lens]
    if sum(counts) > num_pages - 1:
        raise ValueError(f"rows of {list(lens)} tokens need {sum(counts)} pages; the pool has {num_pages - 1}")
    free = np.arange(1, num_pages, dtype=np.int32)
    if seed is not None:
        np.random.default_rng(seed).shuffle(free)
    table = np.zeros((len(counts), max(counts, default=0)), dtype=np.int32)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *counts]), counts, strict=False)):
        table[row, :count] = free[start : start + count]
    return table


def make_batch(
    page_size: int,
    page_table: IntArray,
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    *,
    num_extend: int | None = None,
    input_ids: Sequence[int] | torch.Tensor | None = None,
    drafts: DraftTree | None = None,
    device: torch.device | str = "cpu",
    attn: tuple[Attends, ...] = (),
    kv: tuple[StoresKV, ...] = (),
    other_tables: Sequence[IntArray] = (),
) -> Batch:
    """Return a batch whose row r has ``prefix_lens[r]`` tokens in the pool and ``extend_lens[r]`` more that enter.

    ``page_table`` is ``[rows, >= pages]``, see ``make_page_table``. ``num_extend`` defaults to the rows up to the last
    one that extends (with drafts: to 0). ``drafts`` must satisfy ``extend_lens[r] == 1 + drafts.lens[r]`` in the rows
    after the extend rows; positions follow the tree, and ``tree_mask`` is set unless the tree is a chain. ``input_ids``
    default to 0, 1, 2, ...; ``attn`` and ``kv`` are stored in the batch. All of ``reqs`` are greedy. ``other_tables``
    are the page tables of the cache groups after the first.
    """
    prefix, extend = np.asarray(prefix_lens, np.int32), np.asarray(extend_lens, np.int32)
    rows, none = len(prefix), np.zeros(0, np.int32)
    if num_extend is None:
        num_extend = 0 if drafts is not None else int((np.flatnonzero(extend > 1) + 1).max(initial=0))
    batch = Batch(
        reqs=[_make_req(row, int(prefix[row]), int(extend[row])) for row in range(rows)],
        num_extend=num_extend,
        slots=np.arange(rows, dtype=np.int32),
        prefix_lens=prefix,
        extend_lens=extend,
        samples=np.ones(rows, np.bool_),
        page_updates=PageUpdates(none, none, none[None]),
        drafts=drafts,
        known_lens=(prefix + extend)[:num_extend],
    )
    indptr = np.concatenate([np.zeros(1, np.int32), np.cumsum(extend, dtype=np.int32)])
    row_of = np.repeat(np.arange(rows), extend)
    places = np.arange(indptr[-1]) - indptr[row_of] + prefix[row_of]  # position of each token in its row
    ids = np.arange(len(places)) if input_ids is None else np.asarray(input_ids)
    batch.input_ids = torch.tensor(ids, dtype=torch.int64, device=device)
    positions = places if drafts is None else prefix[row_of] + _depths(batch, drafts)
    batch.positions = torch.tensor(positions, dtype=torch.int64, device=device)

    def located(table: IntArray) -> torch.Tensor:
        out_loc = table[row_of, places // page_size].astype(np.int64) * page_size + places % page_size
        return torch.tensor(out_loc, dtype=torch.int64, device=device)

    batch.out_loc = located(page_table)
    batch.qo_indptr = torch.tensor(indptr, device=device)
    batch.kv_lens = torch.tensor(prefix + extend, device=device)
    batch.page_table = torch.tensor(page_table, device=device)
    if drafts is not None and not drafts.is_chain:
        batch.tree_mask = torch.tensor(make_tree_mask(batch, drafts), device=device)
    batch.attn, batch.kv = attn, kv
    if other_tables:
        set_views(batch, [(torch.tensor(table, device=device), located(table)) for table in other_tables])
    return batch


def share_prefixes(
    batch: Batch,
    table: IntArray,
    starts: Sequence[int],
    lens: Sequence[int],
    page_size: int,
    window: int | None = None,
) -> None:
    """Set ``batch.shared`` (see ``SharedPrefixes``) of a decode batch whose rows have their pages in ``table``. Rows
    from ``starts[-1]`` on are padding. ``batch.page_table`` becomes the table of each row's pages after the shared
    ones, as in the engine. With a ``window``, the pages before those that a row or a group sees are holes.
    """
    positions = None if window is None else batch.prefix_lens
    shared = SharedPrefixes(np.asarray(starts, np.int32), np.asarray(lens, np.int32), window, positions)
    rows, groups, device = len(table), len(lens), batch.kv_lens.device
    indptr, group_lens, row_lens = np.full(rows + 1, rows, np.int32), np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    indptr[: groups + 1], group_lens[:groups] = shared.starts, shared.lens
    row_lens[: starts[-1]] = np.repeat(shared.lens, np.diff(shared.starts))
    group_table, own_table = np.zeros_like(table), np.zeros_like(table)
    if window is not None:
        table, first_positions = table.copy(), np.zeros(rows, np.int32)
        for row in range(rows):
            table[row, : max(0, batch.prefix_lens[row] + 1 - window) // page_size] = 0
        for group in range(groups):
            first_positions[group] = batch.prefix_lens[starts[group] : starts[group + 1]].min()
        shared.first_positions = torch.tensor(first_positions, device=device)
    for group in range(groups):
        pages, first = lens[group] // page_size, starts[group]
        source = first if window is None else first + batch.prefix_lens[first : starts[group + 1]].argmin()
        group_table[group, :pages] = table[source, :pages]
    for row in range(rows):
        pages = row_lens[row] // page_size
        own_table[row, : table.shape[1] - pages] = table[row, pages:]
    shared.indptr, shared.group_lens, shared.group_table, shared.own_table = (
        torch.tensor(array, device=device) for array in (indptr, group_lens, group_table, own_table)
    )
    shared.own_lens = batch.kv_lens - torch.tensor(row_lens, device=device)
    batch.shared, batch.page_table = shared, shared.own_table


def make_tree_mask(batch: Batch, drafts: DraftTree) -> np.ndarray:
    """Return the ``tree_mask`` of a batch, bool ``[tokens, longest row]``. A draft sees its row's last token, its
    ancestors and itself; tokens of extend rows see the tokens before them and themselves."""
    mask = np.zeros((batch.num_tokens, int(batch.extend_lens.max())), np.bool_)
    starts = np.cumsum(batch.extend_lens) - batch.extend_lens
    for row, first in enumerate(starts):
        if row < batch.num_extend:
            count = int(batch.extend_lens[row])
            mask[first : first + count, :count] = np.tri(count, dtype=np.bool_)
            continue
        mask[first : first + batch.extend_lens[row], 0] = True
        for node in range(drafts.lens[row]):
            mask[first + 1 + node] = mask[first + 1 + drafts.parents[row, node]]
            mask[first + 1 + node, 1 + node] = True
    return mask


def _depths(batch: Batch, drafts: DraftTree) -> np.ndarray:
    depths: list[int] = []
    for row, count in enumerate(batch.extend_lens):
        if row < batch.num_extend:
            depths += range(count)
            continue
        own = [0]
        for node in range(count - 1):
            own.append(own[1 + drafts.parents[row, node]] + 1)
        depths += own[:count]
    return np.asarray(depths, np.int64)


def _make_req(row: int, prefix_len: int, extend_len: int) -> AdmittedRequest:
    known = prefix_len + extend_len
    return AdmittedRequest(
        slot=row,
        uid=row,
        params=SamplingParams(temperature=0.0),
        seed=0,
        prompt_len=known,
        token_ids=np.zeros(known + 16, np.int32),
        known_len=known,
    )

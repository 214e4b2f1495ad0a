"""Define the work of a step as data that scheduler and engine exchange. It has neither a ``Req`` nor a tensor, except
``SharedPrefixes``, whose tensors the engine sets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dovetail.types.arrays import BoolArray, Int64Array, IntArray
from dovetail.types.drafts import DraftTree

if TYPE_CHECKING:
    import torch

    from dovetail.sampling_params import SamplingParams


class PageUpdates(NamedTuple):
    """Hold the entries of the page table that are new since the last step: ``page_table[slot, column] = page``. The
    arrays are int32 ``[updates]`` unless noted. Updates with the same ``version`` are the same; 0 means no number."""

    slots: IntArray
    columns: IntArray
    pages: IntArray  # [groups, updates]
    version: int = 0


class StateCopies(NamedTuple):
    """Name copies of states: before the forward pass of the step, the state in slot ``sources[i]`` of state group
    ``groups[i]`` is copied to slot ``targets[i]``, as if all were read before any is written. With data-parallel attention, the
    slots are those of rank ``pools[i]``, which alone copies; otherwise it is 0. Int32 ``[n]`` each."""

    groups: IntArray
    sources: IntArray
    targets: IntArray
    pools: IntArray


class StateSaves(NamedTuple):
    """Name states that are kept while a prompt passes: in state group ``groups[i]``, the state of row ``rows[i]`` after the
    first ``lens[i]`` of its tokens in the step is written to slot ``targets[i]`` too. Int32 ``[n]`` each."""

    rows: IntArray
    lens: IntArray  # multiples of ``interfaces.state_rows.CHUNK``, less than the tokens of the row
    groups: IntArray
    targets: IntArray


@dataclass(slots=True, eq=False)
class SharedPrefixes:
    """Describe prefixes that several rows of a decode batch share, so that attention may read each prefix once.

    Group g consists of rows ``[starts[g], starts[g + 1])``. The first ``lens[g]`` tokens of these rows are in the same
    pages of each cache group. A row that shares nothing is a group of one row with ``lens[g] = 0``. The scheduler sets ``starts`` and
    ``lens``; the engine sets the other fields on the host, and ``Inputs.prepare`` the device tensors. All arrays are int32. The device tensors have space for as many
    groups as there are rows; groups after the last one are empty (no rows, length 0).

    A batch, and each of its views, has one for its own cache group. In a sliding group, a row sees a shared key only where its window
    includes it. The shared tokens before the window of the shortest row of a group may have no pages.
    """

    starts: IntArray  # [groups + 1]
    lens: IntArray  # [groups] tokens, multiples of the page size, less than the KV length of each row of the group
    window: int | None = None  # of the layers of the cache group, if it is sliding
    positions: IntArray | None = None  # [rows] the position of each row's query, if the cache group is sliding
    others: tuple[SharedPrefixes | None, ...] = ()  # for each view, or empty; None: every row reads its own keys

    # set by Inputs.prepare
    indptr: torch.Tensor = field(init=False)  # [rows + 1] group g consists of rows [indptr[g], indptr[g + 1])
    group_lens: torch.Tensor = field(init=False)  # [rows] ``lens`` of each group
    group_table: torch.Tensor = field(init=False)  # [rows, pages] pages of each group's shared tokens
    own_lens: torch.Tensor = field(init=False)  # [rows] KV tokens of each row after the shared ones, at least 1
    own_table: torch.Tensor = field(init=False)  # [rows, pages] pages of these tokens
    first_positions: torch.Tensor = field(init=False)  # [rows] with ``window``: the least position in each group

    @property
    def saved(self) -> int:
        """Return the number of KV tokens that need not be read, compared with rows that read all of their own."""
        counts = np.diff(self.starts)
        if self.window is None:
            return int(((counts - 1) * self.lens).sum())
        assert self.positions is not None, "the engine sets the positions together with the window"
        first = np.maximum(self.positions[: self.starts[-1]] + 1 - self.window, 0)  # the first key that each row sees
        seen = np.maximum(np.repeat(self.lens, counts) - first, 0)
        return int(seen.sum() - np.maximum.reduceat(seen, self.starts[:-1]).sum())

    @property
    def level(self) -> int:
        """Return the number of cache groups in which rows read shared prefixes once."""
        return 1 + sum(own is not None for own in self.others)

    def follow(self, step: SharedPrefixes) -> None:
        """Take the arrays of ``step``, in which the same cache groups share, for this object and ``others``."""
        self.starts, self.lens, self.positions = step.starts, step.lens, step.positions
        for mine, theirs in zip(self.others, step.others, strict=True):
            if mine is not None and theirs is not None:
                mine.follow(theirs)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdmittedRequest:
    """Hold what the engine knows of a request. It is sent once, when the request gets a slot, and again when a
    retracted request gets another slot.

    ``token_ids [max_device_len]`` is append-only: an entry does not change once it is known. The first ``known_len``
    tokens were known when the request was admitted. ``params`` never has a grammar: the engine gets bitmasks.
    """

    slot: int
    uid: int
    params: SamplingParams
    seed: int
    prompt_len: int
    token_ids: IntArray
    known_len: int
    namespace: str = ""
    retracted: bool = False  # the request was retracted before
    constrained: bool = False  # the request has a grammar: its logits get bitmasks
    state_slots: tuple[int, ...] = ()  # by state group: where the state of the request is kept
    adapter: int = 0  # the slot of the request's adapter; 0: none


class DepartedRequest(NamedTuple):
    """Name a request that has ended or was retracted, so that its slot is free. The host knew its first ``known_len`` tokens."""

    uid: int
    known_len: int


@dataclass(slots=True, eq=False)
class StepPlan:
    """Describe the work of one step as data: rows of requests, extend rows first, then decode or verify rows.

    A plan consists of numpy arrays and small structs, so that it can be sent to other processes. Rows name requests by
    their slots; what a request asks for is in ``admitted`` of an earlier plan or of this one. Plans must reach the
    engine in the order of their numbers.

    The scheduler sets all fields (``drafts`` in ``Scheduler.attach``). The step can have drafts if ``draft_limits`` is
    set; the host then knows the first ``prefix_lens + 1`` tokens of each decode row.
    """

    number: int  # counts plans from 1
    num_extend: int  # rows [0, num_extend) are extend rows
    slots: IntArray  # [rows] each request's row in the request table
    prefix_lens: IntArray  # [rows] tokens whose KV is in the pool before this step
    extend_lens: IntArray  # [rows] tokens that enter this step (1 for a decode row, 1 + drafts for a verify row)
    samples: BoolArray  # [rows] True if the row gets a token; False for a chunk that ends before its prompt does
    page_updates: PageUpdates
    known_lens: IntArray  # [num_extend] tokens of each extend row that the host knows
    admitted: tuple[AdmittedRequest, ...] = ()  # requests that got a slot since the last plan
    rows_version: int = 0  # plans with the same number have the same requests in the same rows; 0 means no number
    constrained: bool = False  # a row ``needs_host``: the step is sampled with the result of ``Scheduler.masks``
    draft_limits: IntArray | None = None  # [rows] the most drafts of each row, for which pages are reserved; read-only
    shared: SharedPrefixes | None = None  # of a decode batch; None if there is nothing worth sharing
    drafts: DraftTree | None = None
    state_copies: StateCopies | None = None
    state_saves: StateSaves | None = None


class Masks(NamedTuple):
    """Hold the grammar bitmasks of a step. Logits that are not named allow every token."""

    bits: IntArray  # [n, ceil(V / 32)] int32, for the n logits
    logit_rows: Int64Array  # [n]

"""The data that travels through a step: requests, batches and outputs. Data only, no behaviour.
``dovetail.sampling_params`` holds what a request may ask for.

Shapes: ``rows`` is the number of requests in a batch, ``tokens`` the number of tokens that enter the forward pass,
``k`` the width of a draft tree, ``V`` the vocabulary size. Host arrays are numpy, device tensors are torch.
"""

from __future__ import annotations

import enum
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch

    from dovetail.sampling_params import SamplingParams

IntArray = np.ndarray[Any, np.dtype[np.int32]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Attends(Protocol):
    """The handle through which layers attend; ``interfaces.attention.AttentionBackend`` holds the contract."""

    def forward(self, q: torch.Tensor, layer: Any, batch: Batch) -> torch.Tensor: ...


class StoresKV(Protocol):
    """The handle through which layers keep K and V; ``interfaces.cache.KVPool`` holds the contract."""

    def keys(self, layer_id: int) -> torch.Tensor: ...

    def values(self, layer_id: int) -> torch.Tensor: ...

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor, out_loc: torch.Tensor) -> None: ...


class Acceptance(NamedTuple):
    """What came of drafts: ``accepted`` of ``drafted`` tokens, in ``steps`` that each verified the drafts of one request. Those count
    as accepted that a step brought beyond the one that any step brings."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def length(self) -> float:
        """Tokens that a request got of a step with drafts, on average; 1 before the first."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def rate(self) -> float:
        """Accepted share of the drafts."""
        return self.accepted / max(self.drafted, 1)


class FinishKind(enum.StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a request ended. ``matched`` is the stop string or stop token id; ``message`` explains an abort or error."""

    kind: FinishKind
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability (natural log) of one token, and of the most likely tokens at its position."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Req:
    """A request is cursors over one token array.

        token_ids  [ prompt ............. | output ....... | room ........... ]
                   0        cached_len        device_len         max_device_len

    ``[0, cached_len)`` has its KV in the pool (or in a step already launched), ``[cached_len, device_len)`` must enter
    the next forward pass, ``known_len <= device_len`` tokens are known to the host: under overlap, and while drafts
    are verified, ``device_len`` runs ahead as an upper bound and ``commit`` takes back what was not accepted.
    Invariant: ``cached_len <= device_len <= max_device_len`` and ``known_len <= device_len``.
    """

    rid: str
    token_ids: IntArray  # [max_device_len]
    prompt_len: int
    params: SamplingParams
    seed: int = 0
    namespace: str = ""
    priority: int = 0
    group: str = ""
    group_size: int = 1
    session: str = ""
    arrival: float = field(default_factory=time.monotonic)
    uid: int = -1  # set by Scheduler.add: unique for the life of the scheduler

    cached_len: int = 0
    device_len: int = 0
    known_len: int = 0

    slot: int = -1  # set by the scheduler at admission: the row in the request table
    num_pages: int = 0  # set by the scheduler: pages in its row of the page table
    shared_pages: int = 0  # set by the scheduler: the first of them, owned by the prefix cache
    cache_handle: Any = None  # set by the scheduler: what match or insert returned, locked
    prefix_hit_len: int = 0  # set by the scheduler at first admission: tokens found in the prefix cache
    matcher: Any = None  # an interfaces.grammar.Matcher, set by the scheduler once the grammar is compiled
    meter: Any = None  # a constraints.mask_budget.Meter, set with the matcher: how long that takes
    masks: Any = None  # the GrammarBackend that fills its bitmask together with others', set with the matcher
    grammar_backend: str | None = None  # set by the scheduler with the matcher: whose it is
    finish: FinishReason | None = None  # set by the scheduler
    in_flight: int = 0  # steps launched and not yet committed
    num_retractions: int = 0
    wasted: int = 0  # of the steps in flight, those whose token is not taken, as the request has jumped on
    ticket: Any = None  # set by Scheduler.add: the grammar being compiled, until there is a matcher
    detokenizer: Any = None  # set by Scheduler.add where there are stop strings
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # set by the scheduler, from their start on
    drafted: int = 0  # draft tokens verified so far
    accepted: int = 0  # of those, accepted
    verify_steps: int = 0  # steps in which drafts of it were verified
    draft_len: int = 0  # set by the scheduler: drafts that it may get at once
    accepts: float = -1.0  # drafts accepted at once, a moving average; negative: none verified yet
    error: str | None = None  # set by the engine where a step failed for this request alone
    pooled: Any = None  # set by the scheduler, where params have pooling: float64 [size], of the tokens computed so far

    @property
    def max_device_len(self) -> int:
        """The length at which the request ends with ``length``."""
        return len(self.token_ids)

    @property
    def prefill_only(self) -> bool:
        """True if the request ends with its prompt."""
        return len(self.token_ids) == self.prompt_len

    @property
    def extend_len(self) -> int:
        """Tokens that must enter the next forward pass (before chunking)."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """Tokens that may still be generated."""
        return self.max_device_len - self.device_len

    @property
    def output_ids(self) -> IntArray:
        """The tokens generated so far that the host knows."""
        return self.token_ids[self.prompt_len : self.known_len]


class Phase(enum.StrEnum):
    """What the rows of a batch do. A mixed batch is extend rows followed by decode (or verify) rows."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(slots=True)
class DraftTree:
    """Draft tokens for every row of a batch, in topological order: ``parents[r, j] < j``, -1 is the row's last token.

    A chain is ``parents[r] = [-1, 0, 1, ...]``. Rows without drafts have ``lens[r] = 0``. ``probs`` (0 to 1; anything beyond
    ``lens``) is the probability, by the drafter, of a draft and all those above it, given the text: at most its parent's.
    Below ``scheduler.min_draft_probability`` a draft is not verified; what is accepted does not depend on it. The arrays do
    not change once ``is_chain`` has been asked.
    """

    token_ids: IntArray  # [rows, k]
    parents: IntArray  # [rows, k]
    lens: IntArray  # [rows]
    probs: FloatArray | None = None  # [rows, k], of drafters that offer draft.probs

    _chain: bool | None = field(init=False, default=None, repr=False)

    @classmethod
    def chains(cls, token_ids: IntArray, lens: IntArray) -> DraftTree:
        """A chain in every row. Its ``parents`` are read-only."""
        tree = cls(token_ids, _chain_parents(*token_ids.shape), lens)
        tree._chain = True
        return tree

    @property
    def is_chain(self) -> bool:
        """True if every node's parent is the node before it."""
        if self._chain is None:
            places = np.arange(self.parents.shape[1])
            self._chain = not ((self.parents != places - 1) & (places < self.lens[:, None])).any()
        return self._chain


@functools.lru_cache(maxsize=256)
def _chain_parents(rows: int, width: int) -> IntArray:
    return np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), (rows, width))


class PageUpdates(NamedTuple):
    """New entries of the page table since the last step: ``page_table[slot, column] = page``. int32 ``[updates]`` each."""

    slots: IntArray
    columns: IntArray
    pages: IntArray  # [groups, updates]


@dataclass(slots=True, eq=False)
class SharedPrefixes:
    """Prefixes that rows of a decode batch have in common, so that attention may read them once.

    Group g is rows ``[starts[g], starts[g + 1])``, whose first ``lens[g]`` tokens lie in the same pages. A row that shares
    nothing is a group of one with ``lens[g] = 0``. The scheduler fills the first block, ``Inputs.prepare`` the rest, all
    int32; the device arrays have room for as many groups as rows, what is behind the last group is empty (no rows, length 0).
    """

    starts: IntArray  # [groups + 1]
    lens: IntArray  # [groups] tokens, multiples of the page size, less than the KV length of each row of the group

    # set by Inputs.prepare
    indptr: torch.Tensor = field(init=False)  # [rows + 1] group g has rows [indptr[g], indptr[g + 1])
    group_lens: torch.Tensor = field(init=False)  # [rows] lens
    group_table: torch.Tensor = field(init=False)  # [rows, pages] pages of the shared tokens of each group
    own_lens: torch.Tensor = field(init=False)  # [rows] KV tokens of each row behind the shared ones, at least 1
    own_table: torch.Tensor = field(init=False)  # [rows, pages] their pages

    @property
    def saved(self) -> int:
        """KV tokens that need not be read, compared with every row reading its whole past."""
        return int(((np.diff(self.starts) - 1) * self.lens).sum())


@dataclass(slots=True, eq=False)
class Batch:
    """One step's work: rows of requests, extend rows first, then decode or verify rows.

    The scheduler fills the first block, the loop the drafts, ``Inputs.prepare`` the rest.
    """

    reqs: list[Req]
    num_extend: int  # rows [0, num_extend) are extend rows
    slots: IntArray  # [rows] rows of the request table
    prefix_lens: IntArray  # [rows] tokens whose KV is in the pool before this step
    extend_lens: IntArray  # [rows] tokens that enter this step (1 for a decode row, 1 + drafts for a verify row)
    samples: BoolArray  # [rows] False for a chunk that does not reach the end of its prompt
    page_updates: PageUpdates
    draft_limits: IntArray | None = None  # [rows] draft tokens that pages were reserved for; read-only
    shared: SharedPrefixes | None = None  # of a decode batch; None: nothing, or nothing worth it
    variant: int = 0  # of a decode batch, set by the engine: what AttentionBackend.variant answered
    drafts: DraftTree | None = None  # set by the loop from Drafter.propose

    # set by Inputs.prepare (device tensors, int32 unless said otherwise)
    input_ids: torch.Tensor = field(init=False)  # int64 [tokens]
    positions: torch.Tensor = field(init=False)  # int64 [tokens]
    out_loc: torch.Tensor = field(init=False)  # int64 [tokens] page * page_size + offset: where K and V go
    qo_indptr: torch.Tensor = field(init=False)  # [rows + 1] row r owns tokens [qo_indptr[r], qo_indptr[r + 1])
    kv_lens: torch.Tensor = field(init=False)  # [rows] prefix_lens + extend_lens
    page_table: torch.Tensor = field(init=False)  # [rows, >= pages of the longest row]
    tree_mask: torch.Tensor | None = field(init=False, default=None)  # bool, see AttentionBackend.plan
    logit_rows: torch.Tensor | None = field(init=False, default=None)  # int64 tokens to take logits of; None: all
    last: Batch | None = field(init=False, default=None)  # see ModelArchitecture.forward; its rows are ``logit_rows``
    watch: tuple[int, ...] = field(init=False, default=())  # layers whose hidden states a drafter wants
    hidden: torch.Tensor | None = field(init=False, default=None)  # set by the model: see ModelArchitecture.forward
    attn: tuple[Attends, ...] = field(init=False)  # one per cache group
    kv: tuple[StoresKV, ...] = field(init=False)  # one per cache group

    @property
    def num_tokens(self) -> int:
        """Tokens that enter the forward pass."""
        return sum(self.extend_lens.tolist())

    @property
    def sampled_reqs(self) -> list[Req]:
        """The requests of the rows that get tokens in this step; decode and verify rows always do."""
        return list(itertools.compress(self.reqs, self.samples.tolist())) if self.num_extend else self.reqs

    @property
    def phase(self) -> Phase:
        """What the rows do."""
        if self.num_extend:
            return Phase.MIXED if self.num_extend < len(self.reqs) else Phase.EXTEND
        return Phase.DECODE if self.drafts is None else Phase.VERIFY


class Logprobs(NamedTuple):
    """Log-probabilities at ``n`` places: of the chosen token ``[n]``, and the best ``[n, m]`` with their token ids."""

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


@dataclass(slots=True, eq=False)
class ForwardOutput:
    """What one step produced, on the device until ``Engine.wait`` brings it to the host.

    ``token_ids`` is int64 ``[sampled rows, width]``: of each sampled row the first ``accept_lens[r]`` are new tokens
    (all of them accepted drafts but the last, the bonus token); width is 1 without drafts. ``nodes`` are the tree nodes
    they were sampled at. Sampled row r has its log-probabilities from index ``logprob_start[r]`` on, one per node.
    """

    token_ids: torch.Tensor
    accept_lens: torch.Tensor | None = None  # int64 [sampled rows]; None: 1 each
    nodes: torch.Tensor | None = None  # int64 [sampled rows, width]; None: the root
    logprobs: Logprobs | None = None
    logprob_start: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: Sequence[tuple[int, IntArray, Logprobs]] = ()  # (row, its next tokens, their logprobs)
    pooled: Sequence[tuple[int, torch.Tensor]] = ()  # (row, float32 [size]) of rows that pool
    on_host: ForwardOutput | None = None  # copies in host memory, complete once ``event`` has passed
    event: Any = None  # the device event that the host waits for, once per step


class HostOutput(NamedTuple):
    """A ``ForwardOutput`` on the host: per sampled row the accepted tokens and, where asked for, their logprobs."""

    token_ids: list[list[int]]
    logprobs: list[list[TokenLogprob]] | None = None
    prompt_logprobs: Mapping[int, list[TokenLogprob]] = {}  # by row: entries for the tokens of its chunk
    pooled: Mapping[int, FloatArray] = {}  # by row: of a mean, the sum over its chunk; of others, the vector

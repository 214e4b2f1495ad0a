"""Define the data that travels through a step: requests, batches and outputs. These classes hold data and no behaviour.
``dovetail.sampling_params`` holds the parameters of a request.

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
Int64Array = np.ndarray[Any, np.dtype[np.int64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class Attends(Protocol):
    """Describe the object through which layers attend. Its contract is that of ``interfaces.attention.AttentionBackend``."""

    def forward(self, q: torch.Tensor, layer: Any, batch: Batch) -> torch.Tensor: ...


class StoresKV(Protocol):
    """Describe the object through which layers store K and V. ``interfaces.store.KVStore`` documents the contract."""

    def keys(self, layer_id: int) -> torch.Tensor: ...

    def tensors(self, layer_id: int) -> Any: ...

    def store(self, layer_id: int, k: torch.Tensor, v: torch.Tensor | None, out_loc: torch.Tensor) -> None: ...


class FinishKind(enum.StrEnum):
    """Name why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Describe why a request ended. ``matched`` is the stop string or stop token id; ``message`` explains an abort or error."""

    kind: FinishKind
    matched: str | int | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Hold the log-probability (natural log) of one token, of the most likely tokens at its position, and of the tokens of
    ``token_ids_logprob``. ``logprob`` is None for the first token of a prompt."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()
    given: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Req:
    """Hold one request: one array of tokens, and cursors into it.

        token_ids  [ prompt ............. | output ....... | unused ......... ]
                   0        cached_len        device_len         max_device_len

    - ``[0, cached_len)`` has its KV in the pool, or will have it after a step that is already launched.
    - ``[cached_len, device_len)`` must enter the next forward pass.
    - The host knows the first ``known_len`` tokens.

    ``device_len`` exceeds ``known_len`` under overlap and while drafts are verified: it is then an upper bound, and ``commit``
    moves it back over drafts that were not accepted. Invariants: ``known_len, cached_len <= device_len <= max_device_len``.
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
    tenant: str = ""  # requests of different tenants take turns, in proportion to their weight
    weight: float = 1.0
    arrival: float = field(default_factory=time.monotonic)
    uid: int = -1  # set by Scheduler.add; the scheduler never uses it twice

    cached_len: int = 0
    device_len: int = 0
    known_len: int = 0

    slot: int = -1  # set by the scheduler at admission: the request's row in the request table
    num_pages: int = 0  # set by the scheduler: number of pages in its row of the page table
    shared_pages: int = 0  # set by the scheduler: how many of these, from the first on, the prefix cache owns
    cache_handle: Any = None  # set by the scheduler: the locked handle that match or insert returned
    queue_seconds: float | None = None  # set by the scheduler at first admission: time since arrival
    prefix_hit_len: int = 0  # set by the scheduler at first admission: tokens found in the prefix cache
    prefix_reached: tuple[int, ...] = ()  # set with it if there are several cache groups: Match.reached
    states: Any = None  # set at admission, of models with states: the memory.states.RequestStates
    matcher: Any = None  # set by the scheduler once the grammar is compiled: an interfaces.grammar.Matcher
    meter: Any = None  # set with the matcher: the constraints.mask_budget.Meter of the time that the matcher takes
    masks: Any = None  # set with the matcher: the GrammarBackend that fills bitmasks, of several requests at once
    compile_seconds: float | None = None  # set with the matcher: time from the arrival to the end of the compilation
    grammar_backend: str | None = None  # set with the matcher: the name of the matcher's backend
    finish: FinishReason | None = None  # set by the scheduler
    in_flight: int = 0  # number of steps launched and not yet committed
    num_retractions: int = 0
    wasted: int = 0  # number of steps in flight whose token is discarded, because a jump-forward replaced it
    ticket: Any = None  # set by Scheduler.add: the grammar being compiled; None once the matcher is set
    detokenizer: Any = None  # set by Scheduler.add if the request has stop strings
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)  # from params.prompt_logprobs_start on
    drafted: int = 0  # number of draft tokens verified so far
    accepted: int = 0  # number of them that were accepted
    verify_steps: int = 0  # number of steps in which drafts of this request were verified
    draft_len: int = 0  # set by the scheduler: the most drafts that the request may get in one step
    mean_accepted: float = -1.0  # moving average of the drafts accepted per verify step; negative before the first
    error: str | None = None  # why the request must end with its next token: its matcher failed
    pooled: Any = None  # set by the scheduler if params have pooling: float64 [size], of the tokens computed so far
    adapter: Any = None  # set by Scheduler.add: the scheduler.adapters.KnownAdapter that the request needs

    @property
    def max_device_len(self) -> int:
        """Return the length at which the request ends with finish reason ``length``."""
        return len(self.token_ids)

    @property
    def prefill_only(self) -> bool:
        """Return True if the request generates no token and ends with its prompt."""
        return len(self.token_ids) == self.prompt_len

    @property
    def extend_len(self) -> int:
        """Return the number of tokens that must enter the next forward pass, before chunking."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """Return the number of tokens that may still be generated."""
        return self.max_device_len - self.device_len

    @property
    def output_ids(self) -> IntArray:
        """Return the generated tokens that the host knows."""
        return self.token_ids[self.prompt_len : self.known_len]


class Phase(enum.StrEnum):
    """Name what the rows of a batch do. A mixed batch has extend rows followed by decode (or verify) rows."""

    EXTEND = "extend"
    DECODE = "decode"
    VERIFY = "verify"
    MIXED = "mixed"


@dataclass(slots=True)
class DraftTree:
    """Hold the draft tokens of every row of a batch, in topological order.

    ``parents[r, j] < j`` is the index of the parent node; -1 stands for the row's last token. A chain has ``parents[r]
    = [-1, 0, 1, ...]``. Rows without drafts have ``lens[r] = 0``.

    ``probs[r, j]`` (0 to 1) is the probability that the drafter gives to draft j and all its ancestors together, given
    the text; it is at most the parent's. Entries beyond ``lens`` may hold anything. Drafts below
    ``scheduler.min_draft_probability`` are not verified; which of the verified drafts are accepted does not depend on
    ``probs``. The arrays must not change after the first read of ``is_chain``.
    """

    token_ids: IntArray  # [rows, k]
    parents: IntArray  # [rows, k]
    lens: IntArray  # [rows]
    probs: FloatArray | None = None  # [rows, k], of drafters that offer draft.probs

    _chain: bool | None = field(init=False, default=None, repr=False)

    @classmethod
    def chains(cls, token_ids: IntArray, lens: IntArray) -> DraftTree:
        """Return a tree with a chain in every row. Its ``parents`` are read-only."""
        tree = cls(token_ids, _chain_parents(*token_ids.shape), lens)
        tree._chain = True
        return tree

    @property
    def is_chain(self) -> bool:
        """Return True if every node's parent is the node before it."""
        if self._chain is None:
            nodes = np.arange(self.parents.shape[1])
            self._chain = not ((self.parents != nodes - 1) & (nodes < self.lens[:, None])).any()
        return self._chain

    def row(self, row: int) -> tuple[list[int], list[int]]:
        """Return the draft tokens of a row and their parents."""
        count = int(self.lens[row])
        return self.token_ids[row, :count].tolist(), self.parents[row, :count].tolist()


@functools.lru_cache(maxsize=256)
def _chain_parents(rows: int, width: int) -> IntArray:
    return np.broadcast_to(np.arange(-1, width - 1, dtype=np.int32), (rows, width))


class PageUpdates(NamedTuple):
    """Hold the entries of the page table that are new since the last step: ``page_table[slot, column] = page``. The
    arrays are int32 ``[updates]`` unless noted. Updates with the same ``version`` are the same; 0 means no number."""

    slots: IntArray
    columns: IntArray
    pages: IntArray  # [groups, updates]
    version: int = 0


class StateCopies(NamedTuple):
    """Name copies of states: before the forward pass of the step, the state in slot ``sources[i]`` of state group
    ``groups[i]`` is copied to slot ``targets[i]``, as if all were read before any is written. Int32 ``[n]`` each."""

    groups: IntArray
    sources: IntArray
    targets: IntArray


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
    pages. A row that shares nothing is a group of one row with ``lens[g] = 0``. The scheduler sets ``starts`` and
    ``lens``; ``Inputs.prepare`` sets the device tensors. All are int32. The device tensors have space for as many
    groups as there are rows; groups after the last one are empty (no rows, length 0).
    """

    starts: IntArray  # [groups + 1]
    lens: IntArray  # [groups] tokens, multiples of the page size, less than the KV length of each row of the group

    # set by Inputs.prepare
    indptr: torch.Tensor = field(init=False)  # [rows + 1] group g consists of rows [indptr[g], indptr[g + 1])
    group_lens: torch.Tensor = field(init=False)  # [rows] ``lens`` of each group
    group_table: torch.Tensor = field(init=False)  # [rows, pages] pages of each group's shared tokens
    own_lens: torch.Tensor = field(init=False)  # [rows] KV tokens of each row after the shared ones, at least 1
    own_table: torch.Tensor = field(init=False)  # [rows, pages] pages of these tokens

    @property
    def saved(self) -> int:
        """Return the number of KV tokens that need not be read, compared with rows that read all of their own."""
        return int(((np.diff(self.starts) - 1) * self.lens).sum())


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


class LogitRows(NamedTuple):
    """Assign rows of logits to the rows of a step.

    Sampled row i is row ``rows[i]`` of the step and has logits ``[starts[i], starts[i] + spans[i])``: one row, or one
    for each node of its draft tree, the root first.
    """

    rows: Int64Array
    spans: Int64Array
    starts: Int64Array

    @classmethod
    def of(cls, step: StepPlan | Batch) -> LogitRows:
        """Return the layout of the logits of a step."""
        rows = np.flatnonzero(step.samples).astype(np.int64)
        spans = np.ones(len(rows), np.int64) if step.drafts is None else 1 + step.drafts.lens[rows].astype(np.int64)
        return cls(rows, spans, np.cumsum(spans) - spans)


class Masks(NamedTuple):
    """Hold the grammar bitmasks of a step. Logits that are not named allow every token."""

    bits: IntArray  # [n, ceil(V / 32)] int32, for the n logits
    logit_rows: Int64Array  # [n]


class Committed(NamedTuple):
    """Hold what a drafter learns of the rows of a committed step: the number of tokens that the host knows of each
    request (int32 ``[rows]``), and whether the request has ended (bool ``[rows]``)."""

    known_lens: IntArray
    ended: BoolArray


@dataclass(slots=True, eq=False)
class Batch:
    """Hold the engine's view of a step: the arrays of its ``StepPlan``, its requests, and tensors on the device.

    ``Batch.of`` sets the first block of fields, except ``variant``, which the engine sets. ``Engine.launch`` sets the
    second and the third block, except ``hidden`` (set by the model). The docstring of ``engine.runners.Runner.launch``
    defines which of these fields are set when it returns. In an eager step, ``Inputs.prepare`` sets the second block.
    In a step that replays a CUDA graph, the tensors of both blocks are views of the graph's tensors.
    """

    reqs: Sequence[AdmittedRequest]  # [rows]; empty in batches that the engine makes for itself
    num_extend: int
    slots: IntArray
    prefix_lens: IntArray
    extend_lens: IntArray
    samples: BoolArray
    page_updates: PageUpdates
    draft_limits: IntArray | None = None
    shared: SharedPrefixes | None = None
    variant: int = 0  # of a decode batch, set by the engine: the result of AttentionBackend.variant
    drafts: DraftTree | None = None
    rows_version: int = 0
    known_lens: IntArray | None = None
    adapters: IntArray | None = None  # [rows] slots of adapters, set by the engine's caller; None: no row has one
    state_saves: StateSaves | None = None  # set by the engine's caller

    # set by Inputs.prepare or a graph (device tensors, int32 unless noted)
    input_ids: torch.Tensor = field(init=False)  # int64 [tokens]
    positions: torch.Tensor = field(init=False)  # int64 [tokens]
    out_loc: torch.Tensor = field(init=False)  # int64 [tokens] page * page_size + offset: where K and V are written
    qo_indptr: torch.Tensor = field(init=False)  # [rows + 1] row r owns tokens [qo_indptr[r], qo_indptr[r + 1])
    kv_lens: torch.Tensor = field(init=False)  # [rows] prefix_lens + extend_lens
    page_table: torch.Tensor = field(init=False)  # [rows, >= pages of the longest row]
    tree_mask: torch.Tensor | None = field(init=False, default=None)  # bool, see AttentionBackend.plan
    logit_rows: torch.Tensor | None = field(init=False, default=None)  # int64 tokens that need logits; None: all

    # set by the engine before the forward pass
    last: Batch | None = field(init=False, default=None)  # a row per token in ``logit_rows``: ModelArchitecture.forward
    watch: tuple[int, ...] = field(init=False, default=())  # layers whose hidden states a drafter needs
    hidden: torch.Tensor | None = field(init=False, default=None)  # set by the model: see ModelArchitecture.forward
    attn: tuple[Any, ...] = field(init=False)  # per cache group: Attends, or layers.states.StepStates of a state group
    kv: tuple[StoresKV, ...] = field(init=False)  # one pool per cache group
    views: tuple[Batch, ...] = field(init=False, default=())  # of the cache groups after the first, see ``view``
    expanded: Any = field(init=False, default=None)  # layers.latent.ExpandedRows, if prompts expand their latents

    @classmethod
    def of(cls, plan: StepPlan, reqs: Sequence[AdmittedRequest]) -> Batch:
        """Return the batch of ``plan``. ``reqs [rows]`` are its requests. The arrays are not copied."""
        # by position, because keywords take twice as long
        return cls(reqs, plan.num_extend, plan.slots, plan.prefix_lens, plan.extend_lens, plan.samples, plan.page_updates,
            plan.draft_limits, plan.shared, 0, plan.drafts, plan.rows_version, plan.known_lens)  # fmt: skip

    def view(self, group: int) -> Batch:
        """Return this batch as a cache group sees it: with its own ``page_table`` and ``out_loc``."""
        return self.views[group - 1] if group else self

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that enter the forward pass."""
        return sum(self.extend_lens.tolist())

    @property
    def sampled_reqs(self) -> Sequence[AdmittedRequest]:
        """Return the requests of the rows that get tokens in this step. Decode and verify rows always do."""
        return list(itertools.compress(self.reqs, self.samples.tolist())) if self.num_extend else self.reqs

    @property
    def phase(self) -> Phase:
        """Return the phase of the batch, which depends on the kinds of its rows."""
        if self.num_extend:
            return Phase.MIXED if self.num_extend < len(self.slots) else Phase.EXTEND
        return Phase.DECODE if self.drafts is None else Phase.VERIFY


class Logprobs(NamedTuple):
    """Hold log-probabilities at ``n`` positions: of the chosen token ``[n]``, and of the ``m`` most likely ``[n, m]``
    with their token ids ``[n, m]``. If a request has ``token_ids_logprob``, there are more columns, and the last ones of
    its positions are those of these tokens."""

    chosen: torch.Tensor
    top: torch.Tensor
    top_ids: torch.Tensor


@dataclass(slots=True, eq=False)
class ForwardOutput:
    """Hold what one step produced, on the device until ``Engine.wait`` copies it to the host.

    ``token_ids`` is int64 ``[sampled rows, width]``: the first ``accept_lens[r]`` entries of each sampled row are its
    new tokens. All of them are accepted drafts except the last, which is the bonus token; the width is 1 without
    drafts. ``nodes`` are the tree nodes at which they were sampled. The log-probabilities of sampled row r begin at
    index ``logprob_start[r]``, one per node.
    """

    token_ids: torch.Tensor
    accept_lens: torch.Tensor | None = None  # int64 [sampled rows]; None: 1 for each row
    nodes: torch.Tensor | None = None  # int64 [sampled rows, width]; None: the root of each row
    logprobs: Logprobs | None = None
    logprob_start: Mapping[int, int] = field(default_factory=dict)
    prompt_logprobs: Sequence[tuple[int, IntArray, Logprobs]] = ()  # (row, the prompt tokens scored, their logprobs)
    pooled: Sequence[tuple[int, torch.Tensor]] = ()  # (row, float32 [size]) of rows whose params have pooling
    errors: Mapping[int, str] = field(default_factory=dict)  # by sampled row: why its request must end
    on_host: ForwardOutput | None = None  # copies in host memory, complete once ``event`` has completed
    result: StepResult | None = None  # what the host reads of ``on_host``: views, complete once ``event`` has completed
    event: Any = None  # the device event for which the host waits, once per step


class HostLogprobs(NamedTuple):
    """Hold ``Logprobs`` on the host: float32 ``[n]``, float32 ``[n, m]`` and int64 ``[n, m]``."""

    chosen: FloatArray
    top: FloatArray
    top_ids: Int64Array


class StepResult(NamedTuple):
    """Hold what one step produced, on the host, as packed arrays.

    ``token_ids`` is int64 ``[sampled rows, width]``; the first ``accept_lens[r]`` entries of sampled row r are its new
    tokens (1 for each row if ``accept_lens`` is None). The log-probabilities of sampled row r begin at index
    ``logprob_start[r]``, one for each node of its draft tree, and ``nodes`` (int64 ``[sampled rows, width]``) are the
    nodes at which the tokens were sampled (None: the root of each row).
    """

    token_ids: Int64Array
    accept_lens: Int64Array | None = None
    nodes: Int64Array | None = None
    logprobs: HostLogprobs | None = None
    logprob_start: Mapping[int, int] = {}  # by sampled row
    prompt_logprobs: Sequence[tuple[int, IntArray, HostLogprobs]] = ()  # (row, the prompt tokens scored, theirs)
    pooled: Sequence[tuple[int, FloatArray]] = ()  # (row, sum over its chunk (kind mean) or the vector (other kinds))
    errors: Mapping[int, str] = {}  # by sampled row: why its request must end

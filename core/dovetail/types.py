"""The data that travels through a step: sampling parameters, requests, batches, outputs. Data only, no behaviour.

Shapes: ``rows`` is the number of requests in a batch, ``tokens`` the number of tokens that enter the forward pass,
``k`` the width of a draft tree, ``V`` the vocabulary size. Host arrays are numpy, device tensors are torch.
"""

from __future__ import annotations

import enum
import functools
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dovetail.errors import RequestError

if TYPE_CHECKING:
    import torch

MIN_TEMPERATURE = 1e-5
"""Below it, logits divided by the temperature leave float32, and the most likely token is all there is to sample."""

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


class GrammarKind(enum.StrEnum):
    """What a constraint is written in."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    EBNF = "ebnf"  # llama.cpp's GBNF dialect
    LARK = "lark"  # llguidance's dialect of Lark
    CHOICE = "choice"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the output text. Hashable: it is the key of the compile cache.

    ``text`` is the schema (as JSON), the regex or the grammar; empty for ``json_object``; for ``choice`` a JSON array of the
    texts allowed; for ``structural_tag`` a JSON object ``{"structures": [{"begin", "schema", "end"}, ...], "triggers":
    [...]}``: free text in which whatever begins with a trigger must be one of the structures. ``backend`` names the grammar
    backend that must honour it; None leaves that to the server.
    """

    kind: GrammarKind
    text: str = ""
    backend: str | None = None


@dataclass(frozen=True, slots=True)
class GrammarGate:
    """What an output has before its constraint begins, in token ids; ``interfaces.parsers.Gate`` says it in texts. ``marks``
    are special tokens, each with the ordinary one that stands for it in the grammar."""

    lead: tuple[int, ...] = ()
    optional: bool = False
    until: int | None = None
    may_end: bool = False
    prefix: tuple[int, ...] = ()
    prefix_in_grammar: bool = False
    marks: tuple[tuple[int, int], ...] = ()


class PoolingKind(enum.StrEnum):
    """What a prompt is made into, instead of being continued."""

    LAST = "last"  # the hidden state of its last token
    MEAN = "mean"  # the mean of the hidden states of all its tokens
    LABELS = "labels"  # log-probabilities of given tokens as the next one


MAX_LABELS = 1024
"""Tokens whose log-probabilities one prompt may ask for."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """What is made of a prompt whose ``max_new_tokens`` is 0: one float32 vector.

    Hidden states are those after the model's final norm, ``[hidden_size]``, not normalised further; they need a model that offers
    ``model.embed``. ``labels`` are natural logarithms of the model's own probabilities (softmax over the whole vocabulary, before
    temperature, biases and penalties), in the order of ``token_ids``. Raises ``RequestError``.
    """

    kind: PoolingKind
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind is not PoolingKind.LABELS:
            _require(not self.token_ids, "pooling.token_ids", self.token_ids, f"none, with {self.kind}")
            return
        count = len(self.token_ids)
        _require(1 <= count <= MAX_LABELS, "label_token_ids", f"{count} ids", f"1 to {MAX_LABELS} token ids")
        for token in self.token_ids:
            _require(_is_int(token) and token >= 0, "label_token_ids", token, "token ids of at least 0")

    @property
    def reads_all(self) -> bool:
        """True if every token of the prompt must enter a forward pass, also where its prefix is cached."""
        return self.kind is PoolingKind.MEAN


MAX_TOKEN_SETTINGS = 4096
"""Entries that ``logit_bias`` and ``stop_token_ids`` may have: more cost every step of the batch they are in."""


def _require(ok: bool, param: str, given: object, allowed: str) -> None:
    if not ok:
        raise RequestError(f"{param} is {given!r}; allowed: {allowed}", param=param)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it stops. Validated when it is made.

    ``max_new_tokens=None`` means up to the end of the context; 0 computes the prompt, caches it, and ends there. ``top_k=0``
    (or -1) and ``top_p=1`` switch those filters off. Order of operations: logit bias, repetition / presence / frequency penalties, grammar bitmask,
    temperature, top-k, top-p, min-p. ``temperature=0`` (or under 1e-5) is greedy. ``logprobs=m`` returns the log-probability of each
    output token and of the ``m`` most likely ones, from the model's own logits before any of the above;
    ``prompt_logprobs`` does so for the prompt, from token ``prompt_logprobs_start`` on: what is before it may come from the
    prefix cache. ``seed`` makes sampling reproducible whatever else is in the batch;
    of ``n`` outputs the i-th uses a seed derived from (seed, i). ``grammar_gate`` says where in the output the ``grammar``
    begins to hold, by default at its start. ``keep_special`` are special tokens that stay in the text in spite of
    ``skip_special_tokens``. ``speculative=False`` decodes this request without drafts; outputs are the same either way.
    ``pooling`` asks for a vector made of the prompt, and needs ``max_new_tokens=0``. Raises
    ``RequestError``.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    grammar: GrammarSpec | None = None
    grammar_gate: GrammarGate | None = None
    keep_special: tuple[int, ...] = ()
    speculative: bool = True
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        self._check_lengths()
        self._check_filters()
        self._check_penalties()
        self._check_stops()

    def _check_lengths(self) -> None:
        given = self.max_new_tokens
        _require(given is None or (_is_int(given) and given >= 0), "max_new_tokens", given, "an integer of at least 0")
        low = self.min_new_tokens
        _require(
            _is_int(low) and 0 <= low <= (low if given is None else given),
            "min_new_tokens",
            low,
            "0 up to max_new_tokens",
        )
        _require(self.pooling is None or given == 0, "max_new_tokens", given, "0, with pooling")
        _require(_is_int(self.n) and 1 <= self.n <= 128, "n", self.n, "an integer from 1 to 128")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and 0 <= value <= 100), name, value, "an integer from 0 to 100")
        start = self.prompt_logprobs_start
        _require(_is_int(start) and start >= 0, "prompt_logprobs_start", start, "an integer of at least 0")
        seed = self.seed
        _require(seed is None or (_is_int(seed) and -(2**63) <= seed < 2**63), "seed", seed, "a 64-bit integer")

    def _check_filters(self) -> None:
        t = self.temperature
        _require(_is_number(t) and 0 <= t <= 100, "temperature", t, "a number from 0 to 100")
        _require(_is_number(self.top_p) and 0 < self.top_p <= 1, "top_p", self.top_p, "a number in (0, 1]")
        _require(_is_int(self.top_k) and self.top_k >= -1, "top_k", self.top_k, "an integer; 0 or -1 switches it off")
        _require(_is_number(self.min_p) and 0 <= self.min_p <= 1, "min_p", self.min_p, "a number in [0, 1]")

    def _check_penalties(self) -> None:
        r = self.repetition_penalty
        _require(_is_number(r) and 0.01 <= r <= 100, "repetition_penalty", r, "a number in [0.01, 100]")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(_is_number(value) and -2 <= value <= 2, name, value, "a number in [-2, 2]")
        biases = self.logit_bias
        _require(
            biases is None or isinstance(biases, Mapping), "logit_bias", biases, "a mapping of token ids to biases"
        )
        _require(
            len(biases or ()) <= MAX_TOKEN_SETTINGS,
            "logit_bias",
            f"{len(biases or ())} entries",
            "at most 4096 entries",
        )
        for token, bias in (biases or {}).items():
            _require(_is_int(token) and token >= 0, "logit_bias", token, "token ids of at least 0 as keys")
            _require(_is_number(bias) and -100 <= bias <= 100, "logit_bias", bias, "biases in [-100, 100]")

    def _check_stops(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, tuple | list), name, value, "a tuple, also for one: (x,)")
        _require(len(self.stop) <= 32, "stop", f"{len(self.stop)} strings", "at most 32 strings")
        for text in self.stop:
            _require(isinstance(text, str) and 0 < len(text) <= 1024, "stop", text, "strings of 1 to 1024 characters")
        count = len(self.stop_token_ids)
        _require(count <= MAX_TOKEN_SETTINGS, "stop_token_ids", f"{count} ids", "at most 4096 ids")
        for token in self.stop_token_ids:
            _require(_is_int(token) and token >= 0, "stop_token_ids", token, "token ids of at least 0")
        grammar = self.grammar
        _require(grammar is None or isinstance(grammar, GrammarSpec), "grammar", grammar, "a GrammarSpec(kind, text)")

    @property
    def greedy(self) -> bool:
        """True if every token is the most likely one."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1

    @property
    def penalised(self) -> bool:
        """True if logits depend on the tokens so far or on a bias."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or bool(self.logit_bias)
        )


class Acceptance(NamedTuple):
    """What came of drafts: ``accepted`` of ``drafted`` tokens, in ``steps`` that each verified the drafts of one request."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def length(self) -> float:
        """Tokens that a step with drafts brought on average: those accepted and the target's own; 1 before the first."""
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
    meter: Any = None  # a scheduler.grammar_pace.Meter, set with the matcher: how long that takes
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

    A chain is ``parents[r] = [-1, 0, 1, ...]``. Rows without drafts have ``lens[r] = 0``. The arrays do not change once
    ``is_chain`` has been asked.
    """

    token_ids: IntArray  # [rows, k]
    parents: IntArray  # [rows, k]
    lens: IntArray  # [rows]

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
    draft_room: IntArray | None = None  # [rows] draft tokens that pages were reserved for
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

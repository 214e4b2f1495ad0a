"""Define a request as the scheduler holds it, and why it ended."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dovetail.types.arrays import IntArray

if TYPE_CHECKING:
    from dovetail.sampling_params import SamplingParams


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

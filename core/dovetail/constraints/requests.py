"""Compile the constraints of requests into matchers. The scheduler imports only this module of the package.

A request with a constraint is passed to ``RequestConstraints.begin``, and waits until ``collect`` returns it with its
matcher. From then on the scheduler advances ``Req.matcher``, which is a ``dovetail.interfaces.grammar.Matcher``, token
by token, and may append the tokens of ``forced_tokens``.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from dovetail.constraints.gated import FreeTokens, gated
from dovetail.constraints.jump_forward import JumpForward
from dovetail.constraints.mask_budget import MeteredMatcher
from dovetail.constraints.masks import fill_masks
from dovetail.constraints.restricted import RestrictedMatcher, restrictions_of
from dovetail.errors import EngineError, QueueFullError, RequestError
from dovetail.messages import RequestFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from dovetail.constraints.service import GrammarService, GrammarTotals
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import IntArray, Masks, Req, StepPlan

log = logging.getLogger(__name__)


class RequestConstraints:
    """Compile the constraints of requests and give each request its matcher.

    Mutates these fields of requests: ``ticket`` (set while the constraint is being compiled), ``matcher``, ``meter``,
    ``grammar_backend``, ``compile_seconds`` and ``masks``. Not thread-safe; the compilation runs on the threads of ``service``.
    """

    def __init__(
        self,
        service: GrammarService,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        jump_tokenizer: Tokenizer | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """Store ``service``, which compiles. ``vocab_size`` and ``eos_token_ids`` describe the tokens that an output
        may have before its constraint begins. ``jump_tokenizer`` is the model's tokenizer if jump-forward decoding is
        on, else None. ``tokenizer`` is the model's tokenizer, if it has one."""
        self.service = service
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._free = FreeTokens(vocab_size, eos_token_ids)
        self._jump_forward = JumpForward(jump_tokenizer) if jump_tokenizer is not None else None
        self._compiling: list[Req] = []
        self._mask_width = -(-vocab_size // 32)
        self.mask_seconds = 0.0  # seconds that the host has spent on bitmasks

    def begin(self, req: Req) -> None:
        """Start to compile the constraint of ``req``, if it has one. A request that restricts its tokens and has no
        constraint gets its matcher now. Raises ``RequestError`` for what is refused at once; the request is then
        unchanged."""
        restrictions = restrictions_of(req.params, self._vocab_size, self._tokenizer)
        if restrictions is not None and req.params.grammar is None:
            req.matcher = RestrictedMatcher(restrictions)
        if req.params.grammar is not None:
            req.ticket = self.service.submit(req.params.grammar, req.tenant, req.weight)
            self._compiling.append(req)

    def cancel(self, req: Req) -> None:
        """Stop waiting for the constraint of ``req``, if it is still being compiled."""
        if req.ticket is not None:
            req.ticket.cancel()
            self._compiling.remove(req)

    def collect(self) -> list[tuple[Req, RequestFailed | None]]:
        """Return the requests whose compilation has ended since the last call, each with None if the request has its
        matcher now, or with the failure to report to its client. Never blocks."""
        if not self._compiling:
            return []
        ready = [req for req in self._compiling if req.ticket.ready]
        for req in ready:
            self._compiling.remove(req)
        return [(req, self._finish(req)) for req in ready]

    def _finish(self, req: Req) -> RequestFailed | None:
        ticket, req.ticket = req.ticket, None
        try:
            matcher = gated(self.service.matcher(ticket), req.params.grammar_gate, self._free)
        except RequestError as error:
            return RequestFailed.refused(req.rid, error, req.params)
        except QueueFullError as error:
            return RequestFailed(req.rid, 503, str(error), "queue_full")
        except EngineError as error:
            log.error("request %s got no matcher: %s", req.rid, error)
            return RequestFailed(req.rid, 500, str(error), "engine_error")
        except Exception as error:
            log.exception("the grammar backend gave request %s no matcher", req.rid)
            text = f"the grammar backend gave no matcher: {type(error).__name__}: {error}"
            return RequestFailed(req.rid, 500, text, "engine_error")
        req.meter = self.service.meter(ticket)
        metered = MeteredMatcher(matcher, req.meter)
        restrictions = restrictions_of(req.params, self._vocab_size, self._tokenizer)
        req.matcher = metered if restrictions is None else RestrictedMatcher(restrictions, metered)
        req.grammar_backend = ticket.backend
        req.compile_seconds = time.monotonic() - req.arrival
        req.masks = self.service.backend(ticket.backend)
        return None

    def masks(self, plan: StepPlan, reqs: Sequence[Req], buffer: Callable[[int, int], IntArray]) -> Masks | None:
        """Return the bitmasks of a step. See ``fill_masks``. The time that this takes is added to ``mask_seconds``."""
        start = time.perf_counter()
        masks = fill_masks(plan, reqs, self._mask_width, buffer)
        self.mask_seconds += time.perf_counter() - start
        return masks

    @property
    def num_compiling(self) -> int:
        """Return the number of requests that wait for their constraint."""
        return len(self._compiling)

    @property
    def jumps(self) -> bool:
        """Return True if jump-forward decoding is on."""
        return self._jump_forward is not None

    def forced_tokens(self, req: Req) -> list[int]:
        """Return the tokens that must follow the tokens of ``req``. The list is empty if there is a choice or if
        jump-forward decoding is off. See ``JumpForward.forced_tokens``. Raises any exception that the matcher
        raises."""
        return self._jump_forward.forced_tokens(req) if self._jump_forward is not None else []

    @property
    def totals(self) -> GrammarTotals:
        """Return the counters of compilations since the start."""
        return self.service.totals

    @property
    def cached_bytes(self) -> int:
        """Return the memory of the compiled constraints in the cache, in bytes."""
        return self.service.cached_bytes

    @property
    def evictions(self) -> int:
        """Return the number of compiled constraints that were evicted from the cache since the start."""
        return self.service.evictions

    def close(self) -> None:
        """Start no more compilations. Tickets that still wait end as cancelled."""
        self.service.close()

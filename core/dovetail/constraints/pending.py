"""Requests that wait for their grammars."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dovetail.constraints.gated import FreeTokens, gated
from dovetail.constraints.mask_budget import MeteredMatcher
from dovetail.errors import EngineError, QueueFullError, RequestError
from dovetail.messages import RequestFailed

if TYPE_CHECKING:
    from dovetail.constraints.service import GrammarService
    from dovetail.sampling_params import GrammarSpec
    from dovetail.types import Req

log = logging.getLogger(__name__)


class Compiling:
    """Gives requests their matchers. Mutates their ``ticket`` (set while the grammar is compiled), ``matcher``,
    ``meter``, ``grammar_backend`` and ``masks``."""

    def __init__(self, free: FreeTokens) -> None:
        """``free`` is what a request may say before its grammar begins."""
        self._free = free
        self._reqs: list[Req] = []

    def start(self, req: Req, spec: GrammarSpec, grammars: GrammarService) -> None:
        """Have the grammar compiled. Raises ``GrammarError`` for what is refused at once; then nothing was kept."""
        req.ticket = grammars.submit(spec)
        self._reqs.append(req)

    def cancel(self, req: Req) -> None:
        """The request has left."""
        req.ticket.cancel()
        self._reqs.remove(req)

    def collect(self, grammars: GrammarService) -> list[tuple[Req, RequestFailed | None]]:
        """Requests whose compilation has ended since the last call: None, they have their matcher; or a refusal."""
        ready = [req for req in self._reqs if req.ticket.ready]
        for req in ready:
            self._reqs.remove(req)
        return [(req, self._finish(req, grammars)) for req in ready]

    def _finish(self, req: Req, grammars: GrammarService) -> RequestFailed | None:
        ticket, req.ticket = req.ticket, None
        try:
            matcher = gated(grammars.matcher(ticket), req.params.grammar_gate, self._free)
        except RequestError as error:
            return RequestFailed(req.rid, 400, str(error), error.code, error.param)
        except QueueFullError as error:
            return RequestFailed(req.rid, 503, str(error), "queue_full")
        except EngineError as error:
            log.error("request %s got no matcher: %s", req.rid, error)
            return RequestFailed(req.rid, 500, str(error), "engine_error")
        except Exception as error:
            log.exception("the grammar backend gave request %s no matcher", req.rid)
            text = f"the grammar backend gave no matcher: {type(error).__name__}: {error}"
            return RequestFailed(req.rid, 500, text, "engine_error")
        req.meter = grammars.meter(ticket)
        req.matcher = MeteredMatcher(matcher, req.meter)
        req.grammar_backend = ticket.backend
        req.masks = grammars.backend(ticket.backend)
        return None

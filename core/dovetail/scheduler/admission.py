"""Admission: which prompt tokens enter the next step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from dovetail.interfaces.cache import Match

if TYPE_CHECKING:
    from dovetail.interfaces.policy import SchedulePolicy
    from dovetail.memory.ledger import PageLedger
    from dovetail.scheduler.limits import Limits, Totals
    from dovetail.types import Req

DECODE_HEADROOM = 32
"""Tokens for which each running request counts as a claim on free pages, so that admission does not cause retraction at
once. Retraction makes any value safe; a larger one runs fewer requests, a smaller one retracts more."""


class Admission:
    """Continues chunked prompts, then admits waiting requests in the policy's order while tokens, slots and pages last."""

    def __init__(self, limits: Limits, ledger: PageLedger, policy: SchedulePolicy, totals: Totals) -> None:
        self.limits = limits
        self.ledger = ledger
        self.policy = policy
        self.totals = totals

    def fill(self, waiting: list[Req], prefilling: list[Req], decoding: list[Req]) -> list[tuple[Req, int]]:
        """Requests and the prompt tokens of each that enter this step, ``limits.chunk_size`` in all. Mutates
        ``waiting`` and ``prefilling``."""
        rows: list[tuple[Req, int]] = []
        budget = self.limits.chunk_size
        for req in prefilling:
            if budget > 0 and req.cached_len < req.device_len:
                rows.append((req, min(req.extend_len, budget)))
                budget -= rows[-1][1]
        if budget <= 0 or not waiting or len(prefilling) + len(decoding) >= self.limits.max_running:
            return rows
        return rows + self._admit(waiting, prefilling, decoding, budget)

    def _admit(
        self, waiting: list[Req], prefilling: list[Req], decoding: list[Req], budget: int
    ) -> list[tuple[Req, int]]:
        rows: list[tuple[Req, int]] = []
        computing = [r for r in decoding if r.known_len == r.prompt_len] if self.limits.wait_for_prefix else []
        for req in self._candidates(waiting, prefilling + decoding):
            if (
                budget <= 0
                or len(prefilling) + len(decoding) >= self.limits.max_running
                or not self.ledger.table.num_free
            ):
                break
            match = self._match(req)
            if self.limits.wait_for_prefix and self._is_computed_now(req, match, prefilling + computing):
                continue
            if not self._take(req, match, prefilling + decoding):
                break
            waiting.remove(req)
            prefilling.append(req)
            rows.append((req, min(req.extend_len, budget)))
            budget -= rows[-1][1]
        return rows

    def _candidates(self, waiting: list[Req], running: list[Req]) -> list[Req]:
        """Who may be admitted, in order: retracted requests first, oldest first, then as the policy says. A request
        waits for its grammar, and a retracted one for the token of its last step."""
        ready = [r for r in waiting if r.ticket is None and r.known_len == r.device_len and not r.in_flight]
        retracted = sorted((r for r in ready if r.num_retractions), key=lambda r: r.uid)
        fresh = [r for r in ready if not r.num_retractions]
        if not fresh:
            return retracted
        ordered = self.policy.order(fresh, running)
        if len(ordered) != len(fresh):
            raise ValueError(f"the policy ordered {len(fresh)} requests into {len(ordered)}; it must return them all")
        return retracted + ordered

    def _match(self, req: Req) -> Match:
        """The cached prefix, short of the last token, whose logits are needed; none where prompt logprobs are."""
        length = 0 if _scores_prompt(req) else req.device_len - 1
        return self.ledger.cache.match(req.token_ids[:length], req.namespace)

    def _is_computed_now(self, req: Req, match: Match, computing: list[Req]) -> bool:
        """True if a running prompt will soon have put a longer prefix of this request into the cache."""
        if _scores_prompt(req):
            return False
        page = self.ledger.page_size
        more = match.length + page
        return any(
            other.namespace == req.namespace
            and more <= min(req.device_len - 1, other.prompt_len)
            and np.array_equal(req.token_ids[:more], other.token_ids[:more])
            for other in computing
        )

    def _take(self, req: Req, match: Match, running: list[Req]) -> bool:
        """Admit the request if its whole text fits beside what the running ones are likely to need soon."""
        ledger = self.ledger
        claims = sum(
            max(0, ledger.pages_for(r.device_len + min(r.remain_len, DECODE_HEADROOM)) - r.num_pages) for r in running
        )
        need = ledger.pages_for(req.device_len) - match.pages.shape[1]
        ledger.cache.lock(match.handle)
        fits = need + claims <= ledger.available
        if fits:
            self._place(req, match)
        ledger.cache.unlock(match.handle)
        return fits

    def _place(self, req: Req, match: Match) -> None:
        self.ledger.admit(req, match)
        reserved = self.ledger.reserve(req, req.device_len)
        assert reserved, "pages counted as available could not be reserved"
        if not req.num_retractions:
            req.prefix_hit_len = match.length
            self.totals.cached_tokens += match.length


def _scores_prompt(req: Req) -> bool:
    """True if log-probabilities of its prompt are still to be computed: then a cached prefix is of no use to it."""
    return req.params.prompt_logprobs is not None and len(req.prompt_logprobs) < req.prompt_len

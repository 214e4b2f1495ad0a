"""Choose the prompt tokens that enter the next step, and admit waiting requests."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from dovetail.interfaces.cache import Match
from dovetail.scheduler.adapters import AdapterTable
from dovetail.scheduler.groups import group_adjacent
from dovetail.scheduler.outcome import prompt_scored
from dovetail.scheduler.policy_guard import PolicyGuard
from dovetail.scheduler.pool_choice import PoolPlace, best_first
from dovetail.scheduler.turns import LEAST_TOKENS, TenantTurns
from dovetail.scheduler.waits import PrefixWaits

if TYPE_CHECKING:
    from dovetail.interfaces.policy import SchedulePolicy
    from dovetail.memory.ledger import PageLedger
    from dovetail.memory.pools import PoolLedgers
    from dovetail.scheduler.groups import Groups
    from dovetail.scheduler.limits import SchedulerLimits, Totals
    from dovetail.scheduler.plans import Plans
    from dovetail.scheduler.snapshots import Snapshots
    from dovetail.types import Req

DECODE_HEADROOM = 32
"""Set the number of future tokens of each running request for which admission leaves pages free. Without it, an
admitted request could cause a retraction at once. Any value is safe, because requests can be retracted: with a larger
value fewer requests run, with a smaller value more are retracted."""


class Admission:
    """Continue chunked prompts, then admit waiting requests in the policy's order while tokens, slots and pages
    last."""

    def __init__(
        self,
        limits: SchedulerLimits,
        ledger: PageLedger | PoolLedgers,
        plans: Plans,
        policy: SchedulePolicy,
        totals: Totals,
        groups: Groups,
        snapshots: Snapshots | None = None,
    ) -> None:
        """``snapshots`` is set for models with states."""
        self.adapters = AdapterTable(limits.adapter_slots)
        self.limits = limits
        self.ledger = ledger
        self.guard = PolicyGuard(policy, totals)
        self.turns = TenantTurns(limits, policy.by_priority)
        self.totals = totals
        self._plans, self._groups, self._snapshots = plans, groups, snapshots
        reach = None if snapshots is None else snapshots.reach
        # one for each pool: a prefix that is computed in one pool is of no use in another
        self._waits = tuple(
            PrefixWaits(
                ledger.page_size, only_groups=not limits.wait_for_prefix, ahead=ledger.tokens_ahead, reach=reach
            )
            for _ in ledger.members
        )

    def select(self, waiting: list[Req], prefilling: list[Req], decoding: list[Req]) -> list[tuple[Req, int]]:
        """Return the requests whose prompt tokens enter this step, each with the number of these tokens, which is at
        most ``limits.chunk_size`` over all requests. Mutates ``waiting`` and ``prefilling``."""
        if not waiting and not prefilling:
            return []
        budget = self.turns.budget()
        rows, snapshots = self.turns.divide(budget, waiting, prefilling), self._snapshots
        if snapshots is not None:
            rows = [(req, snapshots.limit(req, count)) for req, count in rows]
        used = sum(count for _, count in rows)
        budget -= used
        if budget > 0 and waiting and len(prefilling) + len(decoding) < self.limits.max_running:
            rows += self._admit(waiting, prefilling, decoding, budget, self.limits.chunk_size - used)
        if snapshots is not None:
            rows = [(req, snapshots.cut(req, count)) for req, count in rows]
        self.turns.chosen(rows, waiting)
        return rows

    def forget(self, req: Req) -> None:
        """Forget a request that has left the waiting queue without being admitted."""
        for waits in self._waits:
            waits.forget(req)
        if not req.num_retractions:
            self._groups.left_queue(req)

    def _admit(
        self, waiting: list[Req], prefilling: list[Req], decoding: list[Req], budget: int, left: int
    ) -> list[tuple[Req, int]]:
        """Admit requests while ``budget`` lasts. The last one may have up to ``LEAST_TOKENS`` more if it needs no others:
        otherwise its first token would wait for one more step, because of a few tokens. They never have more than ``left``
        in all."""
        spare = LEAST_TOKENS if budget < left else 0
        rows: list[tuple[Req, int]] = []
        waits = self._waits if self.limits.reuses_prefixes else ()
        computing = prefilling + [r for r in decoding if r.known_len == r.prompt_len] if waits else []
        for pool, own in enumerate(waits):
            own.begin(self._of_pool(computing, pool))
        counts = [len(self._of_pool(prefilling + decoding, member.pool)) for member in self.ledger.members]
        claims: list[int] | None = None
        full: set[str] = set()
        candidates = self._candidates(waiting, prefilling + decoding)
        held, few = self.turns.take_held(), self.turns.few
        more, kept = (min(budget, left - budget), (budget + 1) // 2) if few else (0, 0)
        budget += more  # for tenants with few requests, whose prompts would otherwise wait for several steps
        for req in candidates:
            if kept and req.tenant not in few:
                budget, kept = min(max(budget - more, kept), left), 0
            if budget <= 0 and kept:
                continue
            if (
                budget <= 0
                or len(prefilling) + len(decoding) >= self.limits.max_running
                or not self.ledger.table.num_free
            ):
                break
            if any(own.is_waiting(req) for own in waits) or (rows and req.tenant in held):
                continue
            if req.tenant in full or not self.turns.may_run(req, prefilling, decoding):
                full.add(req.tenant)
                continue
            if req.adapter is not None and not self.adapters.may_run(req):
                continue
            places = self._places(req, counts)
            pool = places[0].ledger.pool
            if waits and not _reads_prompt(req) and waits[pool].start_waiting(req, places[0].match.length):
                continue
            if claims is None:
                claims = self._claims(prefilling + decoding)
            if not self._admit_to_one(req, places, claims):
                break
            pool = self.ledger.of(req).pool
            claims[pool] += self._claim(req)
            counts[pool] += 1
            if req.tenant in held:
                held = frozenset()  # nothing else can be admitted
            if waits:
                waits[pool].add(req)
            prefilling.append(req)
            count = min(req.extend_len if req.extend_len <= budget + spare else budget, left)
            rows.append((req, count if self._snapshots is None else self._snapshots.limit(req, count)))
            budget, left = budget - rows[-1][1], left - rows[-1][1]
        if rows:
            waiting[:] = [req for req in waiting if req.slot < 0]
        return rows

    def _candidates(self, waiting: list[Req], running: list[Req]) -> Iterable[Req]:
        """Return the requests that may be admitted, in the order in which to admit them.

        Retracted requests come first, the oldest of them first. Then come the others in the policy's order, except that
        the members of a group follow its first one, and that tenants take turns. Requests that wait for their constraint
        are left out, and so are retracted requests whose last token has not been committed.
        """
        ready = [r for r in waiting if r.ticket is None and r.known_len == r.device_len and not r.in_flight]
        retracted = sorted((r for r in ready if r.num_retractions), key=lambda r: r.uid)
        fresh = [r for r in ready if not r.num_retractions]
        if not fresh:
            return retracted
        ordered = self.guard.order(fresh, running)
        ordered = group_adjacent(ordered) if any(req.group for req in ordered) else ordered
        return chain(retracted, self.turns.order(ordered, running))

    def _of_pool(self, reqs: list[Req], pool: int) -> list[Req]:
        """Return the running requests among ``reqs`` that belong to a pool."""
        return reqs if len(self.ledger.members) == 1 else [req for req in reqs if self.ledger.of(req).pool == pool]

    def _places(self, req: Req, counts: list[int]) -> list[PoolPlace]:
        """Return the pools that have a slot for the request, the best one first. There must be one. ``counts`` are the
        numbers of running requests of all pools."""
        free = [member for member in self.ledger.members if member.num_free_slots]
        places = [PoolPlace(member, self._match(req, member), counts[member.pool]) for member in free]
        return places if len(places) == 1 else best_first(places, counts)

    def _match(self, req: Req, ledger: PageLedger) -> Match:
        """Return the cached prefix of ``req`` in the pool of ``ledger``. The prefix ends before the last token, whose logits are needed, and
        before the first prompt token that must be computed for log-probabilities or a pooled vector."""
        length = min(_first_read(req) if _reads_prompt(req) else req.device_len, req.device_len) - 1
        known = min(length + ledger.tokens_ahead, req.device_len)
        return ledger.cache.match(req.token_ids[:known], req.namespace)

    def _claim(self, req: Req) -> int:
        """Return the number of pages that a running request is likely to need soon, beyond those it has."""
        length = min(req.device_len + DECODE_HEADROOM, req.max_device_len)
        return max(0, self.ledger.pages_for(length) - req.num_pages)

    def _claims(self, running: list[Req]) -> list[int]:
        """Return the sums of the claims of the running requests of each pool."""
        return [sum(map(self._claim, self._of_pool(running, member.pool))) for member in self.ledger.members]

    def _admit_to_one(self, req: Req, places: list[PoolPlace], claims: list[int]) -> bool:
        """Admit the request to the first of ``places`` that has enough memory. ``claims`` are those of each pool. Return True
        if it was admitted."""
        return any(
            self._try_to_admit(req, ledger, match, claims[ledger.pool])
            or (not running and self._admit_uncached(req, ledger))
            for ledger, match, running in places
        )

    def _try_to_admit(self, req: Req, ledger: PageLedger, match: Match, claims: int) -> bool:
        """Admit the request if enough memory is left for all its tokens and its states, and for the ``claims`` of the running
        requests. Return True if it was admitted."""
        need = ledger.pages_for(req.device_len) - match.pages.shape[1]
        ledger.cache.lock(match.handle)  # before anything is evicted for the other pages
        if not ledger.ensure_available(need + claims, 0 if ledger.states is None else 1):
            ledger.cache.unlock(match.handle)
            return False
        self._enter_table(req, ledger, match)
        return True

    def _admit_uncached(self, req: Req, ledger: PageLedger) -> bool:
        """Admit a request that nothing runs beside, without its cached prefix: what that keeps from eviction may be what is
        missing. Return True if it was admitted."""
        return self._try_to_admit(req, ledger, ledger.cache.match(req.token_ids[:0], req.namespace), 0)

    def _enter_table(self, req: Req, ledger: PageLedger, match: Match) -> None:
        ledger.admit(req, match)
        if self._snapshots is not None:
            self._snapshots.admit(req, match)
        self._plans.admit(req)
        if req.adapter is not None:
            self.adapters.entered(req)
        reserved = ledger.reserve(req, req.device_len)
        assert reserved, "pages counted as available could not be reserved"
        if not req.num_retractions:
            self._groups.left_queue(req)
            req.prefix_hit_len = match.length
            req.queue_seconds = time.monotonic() - req.arrival
            self.totals.cached_tokens += match.length
            if len(match.reached) > 1:
                req.prefix_reached = match.reached
                self.totals.add_groups(match.reached)


def _reads_prompt(req: Req) -> bool:
    """Return True if prompt tokens must be computed for their log-probabilities or for pooling, even if they are
    cached."""
    params = req.params
    return (params.prompt_logprobs is not None and prompt_scored(req) < req.prompt_len) or (
        params.pooling is not None and params.pooling.reads_all
    )


def _first_read(req: Req) -> int:
    """Return the index of the first prompt token whose log-probability or hidden state must still be computed. The
    token before it must enter a step."""
    pooling = req.params.pooling
    return 1 if pooling is not None and pooling.reads_all else prompt_scored(req)

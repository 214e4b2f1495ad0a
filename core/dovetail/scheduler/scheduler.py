"""Schedule requests: add, schedule, commit, abort. This is plain Python on the host, without tensors or devices.

A request waits, then prefills (its prompt enters in chunks), then decodes, then is finished:

    add -> waiting -> prefilling -> decoding -> finished
              ^___________|____________|   retract: its pages are needed for other requests; its tokens are kept

Cursors advance in ``schedule``, when a plan is made. ``commit`` adds the sampled tokens of the step; under overlap it
is called one step later.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import QueueFullError, RequestError
from dovetail.messages import Answer, GenerateMsg, RequestFailed
from dovetail.scheduler.admission import Admission
from dovetail.scheduler.decoding import Decoding
from dovetail.scheduler.drafts import checked, within_declared
from dovetail.scheduler.groups import Groups
from dovetail.scheduler.intake import make_req
from dovetail.scheduler.limits import PageCounts, SchedulerLimits, Totals
from dovetail.scheduler.outcome import (
    aborted,
    add_pooled,
    add_prompt_logprobs,
    end_prefilled,
    forced_tokens,
    prefilled,
    settle_drafts,
    take_forced,
    take_tokens,
)
from dovetail.scheduler.pins import Clock, PinKey, Pins
from dovetail.scheduler.plans import Plans
from dovetail.scheduler.pool_pins import PoolPins
from dovetail.scheduler.results import logprobs_of, tokens_of
from dovetail.scheduler.rows import DecodeRows
from dovetail.scheduler.snapshots import Snapshots
from dovetail.scheduler.turns import has_equal_share, largest_tenant
from dovetail.types import Committed, DepartedRequest, FinishKind, FinishReason, Req, StepPlan, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.constraints.requests import RequestConstraints
    from dovetail.interfaces.policy import SchedulePolicy
    from dovetail.memory.ledger import PageLedger
    from dovetail.memory.pools import PoolLedgers
    from dovetail.scheduler.adapters import KnownAdapter
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import DraftTree, IntArray, Masks, PageUpdates


class Scheduler:
    """Decide which requests run in each step, and append the tokens that the step has produced. Not thread-safe."""

    def __init__(
        self,
        limits: SchedulerLimits,
        ledger: PageLedger | PoolLedgers,
        policy: SchedulePolicy,
        constraints: RequestConstraints,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
        clock: Clock = time.monotonic,
    ) -> None:
        self.limits = limits
        self.ledger = ledger
        self.constraints = constraints
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.totals = Totals()
        self.waiting: list[Req] = []
        self.prefilling: list[Req] = []
        self.decoding: list[Req] = []
        shares_prefixes = limits.shared_prefixes and not limits.draft_width
        self._plans = Plans()
        self._rows = Decoding(ledger, self._plans, self.decoding, shares_prefixes=shares_prefixes)
        self.pins = _pins_of(limits, ledger, self.totals, clock)
        self.groups = Groups(self.pins, ledger.page_size, limits.pin_seconds, ledger.tokens_ahead)
        self._snapshots = None if ledger.members[0].states is None else Snapshots(limits, ledger)
        self._admission = Admission(limits, ledger, self._plans, policy, self.totals, self.groups, self._snapshots)
        self.adapters = self._admission.adapters
        self._departed: list[DepartedRequest] = []
        self._committed: list[Req] = []  # the requests of the step that was committed last
        self._by_rid: dict[str, Req] = {}
        self._next_uid = 0

    # -- add ---------------------------------------------------------------------------------------------------------

    def add(self, msg: GenerateMsg) -> Req:
        """Put a request into the waiting queue. Raises ``RequestError`` or ``QueueFullError``; the scheduler is then
        unchanged."""
        if msg.rid in self._by_rid:
            raise RequestError(f"rid {msg.rid!r} is already in use; request ids must be unique", param="rid")
        most = self.limits.max_waiting
        full = len(self.waiting) >= most and not msg.accepted
        if full and has_equal_share(self.waiting, msg.tenant, most):
            raise QueueFullError(
                f"{len(self.waiting)} requests are waiting, which is the limit (scheduler.max_waiting); retry later"
            )
        req = make_req(msg, self.limits, self.tokenizer)
        if msg.adapter:
            self.adapters.attach(req, msg.adapter, msg.adapter_directory, msg.adapter_param)
        self.constraints.begin(req)
        if req.adapter is not None:
            req.adapter.requests += 1
        req.uid, self._next_uid = self._next_uid, self._next_uid + 1
        self.waiting.append(req)
        self._admission.turns.arrived(req.tenant)
        self.groups.joined_queue(req)
        self._by_rid[req.rid] = req
        self.totals.prompt_tokens += req.prompt_len
        return req

    # -- schedule ----------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Req]:
        """Return the requests that hold pages."""
        return self.prefilling + self.decoding

    @property
    def has_work(self) -> bool:
        """Return True while any request is unfinished."""
        return bool(self._by_rid)

    def poll(self) -> list[Answer]:
        """Collect the constraints that have been compiled. Return the answers of requests whose constraint was
        refused."""
        answers: list[Answer] = []
        for req, refusal in self.constraints.collect():
            if refusal is not None:
                answers.append(self._refuse(req, refusal))
        return answers

    def _refuse(self, req: Req, refusal: Answer) -> Answer:
        self.waiting.remove(req)
        self._admission.forget(req)
        self._forget(req)
        return refusal

    def refuse_adapter(self, adapter: KnownAdapter, message: str) -> list[Answer]:
        """End the waiting requests of an adapter that cannot be loaded, and return their answers."""
        concerned = [req for req in self.waiting if req.adapter is adapter]
        for req in concerned:
            self.constraints.cancel(req)
        return [self._refuse(req, RequestFailed(req.rid, 500, message, "adapter_error")) for req in concerned]

    def take_departed(self) -> list[DepartedRequest]:
        """Return the requests that have ended or were retracted since the last call. The drafter drops their state.
        Without a drafter the list is empty."""
        departed, self._departed = self._departed, []
        return departed

    def schedule(self) -> StepPlan | None:
        """Return the plan of the next step, with pages reserved and cursors advanced; None if nothing can run now."""
        self.expire()
        rows = self._rows.reserve(self.limits.draft_width, self._retract_one)
        extend = self._admission.select(self.waiting, self.prefilling, self.decoding)
        if extend:
            plan = self._mixed_plan(extend, rows if self.limits.mixed else DecodeRows([], self.ledger.page_size))
        elif rows.reqs:
            plan = self._rows.plan(rows, self.limits.draft_width)
        else:
            return None
        if self._snapshots is not None:
            self._snapshots.fill(plan, self._plans.reqs_of(plan))
        return plan

    def expire(self) -> None:
        """Release the pins of groups and sessions whose next request has not arrived in time."""
        self.pins.expire()
        self.groups.expire()

    def reserve_ahead(self) -> PageUpdates:
        """Reserve pages for the drafts of the next step while the device computes this one. Return the page updates of
        the next plan so far; more may be added before that plan is made."""
        self._rows.reserve_ahead(self.limits.draft_width)
        return self.ledger.table.next_updates()

    def _retract_one(self, lacking: Req) -> None:
        """Move the running request that was added last, of the tenant that holds the most pages, back to the waiting
        queue. Its tokens are kept; its pages are freed or given to the prefix cache. ``lacking`` is a request that lacks
        pages, of whose pool they must be."""
        self._rows.invalidate()
        ledger = self.ledger.of(lacking)
        concerned = [r for r in self.running if self.ledger.of(r) is ledger]
        tenant = largest_tenant(concerned)
        victim = max((r for r in concerned if tenant in (None, r.tenant)), key=lambda r: r.uid)
        (self.prefilling if victim in self.prefilling else self.decoding).remove(victim)
        self._release(victim)
        victim.cached_len = 0
        victim.num_retractions += 1
        self.totals.retractions += 1
        self.waiting.insert(0, victim)

    def _mixed_plan(self, extend: list[tuple[Req, int]], decode: DecodeRows) -> StepPlan:
        plan = self._plans.mixed(extend, decode, self.ledger.table.take_updates(), self.limits.draft_width)
        decode.advance()
        plan.samples[: len(extend)] = [self._enter(req, count) for req, count in extend]
        return plan

    def _enter(self, req: Req, count: int) -> bool:
        """Advance the cursors of ``req`` by ``count`` prompt tokens that enter a step. Return True if these are its
        last prompt tokens and it generates tokens; from now on the request decodes."""
        req.cached_len += count
        req.in_flight += 1
        if req.cached_len < req.device_len or req.prefill_only:
            return False
        req.device_len += 1
        self.prefilling.remove(req)
        self.decoding.append(req)
        self._rows.invalidate()
        return True

    def attach(self, plan: StepPlan, drafts: DraftTree) -> str:
        """Turn the decode rows of a plan into verify rows. Cursors advance as if every draft were accepted.

        Drafts beyond what the drafter has declared are cut off; returns a text about them, "" if there were none.
        Raises ``ValueError``, with nothing changed, for drafts that break the contract of ``Drafter.propose`` otherwise.
        """
        drafts, excess = within_declared(plan, drafts, trees=self.limits.draft_trees)
        tree = checked(plan, drafts, self.limits.vocab_size, self.limits.min_draft_probability)
        if tree is None:
            return excess
        plan.drafts = tree
        plan.extend_lens = plan.extend_lens + tree.lens
        self._rows.draft(tree.lens[plan.num_extend :], tree.token_ids.shape[1])
        for req, count in zip(self._plans.reqs_of(plan), tree.lens.tolist(), strict=True):
            req.cached_len += count
            req.device_len += count
        return excess

    def masks(self, plan: StepPlan, buffer: Callable[[int, int], IntArray]) -> Masks | None:
        """Return the bitmasks of the rows of ``plan`` that have a grammar; None if no row needs one. The step before
        must have been committed. ``buffer(rows, width)`` provides their memory, int32 and uninitialised."""
        return self.constraints.masks(plan, self._plans.reqs_of(plan), buffer) if plan.constrained else None

    def take_back(self, plan: StepPlan) -> None:
        """Move the cursors back over a step that failed, because its tokens may have no KV in the pool. The plan's page
        updates, which can concern requests of other steps, may not have reached the engine, so they are part of the
        next plan again. The caller must call ``fail`` once the step before this one is committed."""
        self.ledger.table.put_back(plan.page_updates)
        for req, count in zip(self._plans.reqs_of(plan), plan.extend_lens.tolist(), strict=True):
            req.cached_len -= count
        self._rows.invalidate()

    # -- commit ------------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Answer]:
        """Append the step's tokens to their requests, in place, and return the answers for their clients. Finished
        requests release their pages."""
        reqs = self._committed = self._plans.close(plan)
        if self._snapshots is not None:
            self._snapshots.committed(plan.number)
        for req in reqs:
            req.in_flight -= 1
        for row, scored, entries in result.prompt_logprobs:
            add_prompt_logprobs(reqs[row], int(plan.prefix_lens[row]), scored, entries)
        for row, vector in result.pooled:
            add_pooled(reqs[row], int(plan.prefix_lens[row]), vector)
        sampled = list(itertools.compress(reqs, plan.samples.tolist())) if plan.num_extend else reqs
        for row, message in result.errors.items():
            sampled[row].error = message
        tokens = tokens_of(result)
        if plan.drafts is not None:
            settle_drafts(plan, sampled, tokens, self.totals, self.limits)
            self._rows.settle(adapted=self.limits.adapts(plan.drafts))
        logprobs = [None] * len(tokens) if result.logprobs is None else logprobs_of(result, sampled, tokens)
        jump = self._jump if self.constraints.jumps else None
        eos_token_ids, totals, generated = self.eos_token_ids, self.totals, 0
        answers = [
            take_tokens(req, new, entries, eos_token_ids, totals, jump)
            for req, new, entries in zip(sampled, tokens, logprobs, strict=True)
            if req.finish is None and not (req.wasted and self._is_wasted(req))
        ]
        if plan.num_extend:
            answers += [end_prefilled(req) for req in prefilled(plan, reqs)]
        ended: list[Req] = []
        for answer in answers:
            generated += len(answer.token_ids)
            if answer.finish is not None:
                ended.append(self._by_rid[answer.rid])
        totals.generated_tokens += generated
        if ended:
            self._leave(ended)
        for req in reqs[: plan.num_extend]:
            if req.finish is None and req.slot >= 0:
                self._share(req)
        if self.ledger.slides:
            self._release_behind(plan, reqs)
        return [*answers]

    def _release_behind(self, plan: StepPlan, reqs: list[Req]) -> None:
        """Free the pages that the windows of requests have left. A request is considered when the step has filled a page."""
        size = self.ledger.page_size
        ends = plan.prefix_lens + plan.extend_lens
        for row in np.flatnonzero(ends // size != plan.prefix_lens // size).tolist():
            req = reqs[row]
            if req.finish is None and req.slot >= 0:
                # all known tokens but the last one have their KV; of the drafts, those that were accepted
                self.ledger.release_behind(req, min(int(ends[row]), req.known_len - 1))

    def committed(self) -> Committed:
        """Return what a drafter learns of the rows of the step that was committed last."""
        reqs = self._committed
        return Committed(
            np.array([r.known_len for r in reqs], np.int32), np.array([r.finish is not None for r in reqs], np.bool_)
        )

    def _is_wasted(self, req: Req) -> bool:
        """Return True if jump-forward has meanwhile filled the position for which this step sampled a token. Counts
        down ``req.wasted``."""
        if not req.wasted:
            return False
        req.wasted -= 1
        return True

    def _jump(self, req: Req) -> list[int]:
        """Append the tokens that the constraint forces, if there are pages for them, and return them. They enter a step
        like a chunk of a prompt. If a step of the request is in flight, the token that it samples is discarded. A jump
        over one token would then gain nothing, so it is not made."""
        tokens = forced_tokens(req, self.constraints)
        if len(tokens) <= min(req.in_flight, 1):
            return []
        if req.slot >= 0:
            self._rows.invalidate()
            if not self.ledger.reserve(req, req.known_len + len(tokens)):
                return []
        tokens = take_forced(req, tokens, self.eos_token_ids)
        self.totals.jumped_tokens += len(tokens)
        if tokens and req.finish is None:
            req.device_len, req.wasted = req.known_len, req.in_flight
            if req.slot >= 0:
                self.decoding.remove(req)
                self.prefilling.append(req)
        return tokens

    def _share(self, req: Req) -> None:
        """Insert the computed part of the request's prompt into the cache, where other requests may read it."""
        length = self._computed_len(req)
        self.ledger.share(req, length)
        self.groups.computed(req, length)
        self._rows.invalidate_sharing()

    # -- leave -------------------------------------------------------------------------------------------------------

    def abort(self, rid: str, message: str) -> list[Answer]:
        """End a request now. Unknown ids are ignored, because the request may just have finished."""
        req = self._by_rid.get(rid)
        return self._abort([req], message) if req is not None else []

    def abort_all(self, message: str) -> list[Answer]:
        """End every request now."""
        answers = self._abort(list(self._by_rid.values()), message)
        self.release_pins()
        return answers

    def release_pins(self) -> None:
        """Release all pins, and drop all groups."""
        self.groups.clear()
        self.pins.clear()

    def flush_cache(self) -> int:
        """Empty the prefix cache and return the number of pages that this frees. No request may be running or
        waiting."""
        self.release_pins()
        return self.ledger.flush()

    def _abort(self, reqs: list[Req], message: str) -> list[Answer]:
        for req in reqs:
            req.finish = FinishReason(FinishKind.ABORT, message=message)
            self.constraints.cancel(req)
        self._leave(reqs)
        return [aborted(req) for req in reqs]

    def fail(self, plan: StepPlan, message: str) -> list[Answer]:
        """End the requests of a step that failed. Their pages are freed and not cached, because their content is
        unknown."""
        failed = [req for req in self._plans.close(plan) if req.finish is None]
        if self._snapshots is not None:
            self._snapshots.failed(plan.number)
        for req in failed:
            req.finish = FinishReason(FinishKind.ERROR, message=message)
        self._leave(failed, keep=False)
        return [RequestFailed(req.rid, 500, message, "engine_error") for req in failed]

    def _leave(self, reqs: list[Req], *, keep: bool = True) -> None:
        """Remove requests that have just finished from the queues, the request table and the ledger, in one pass over
        them."""
        if any(req.slot >= 0 for req in reqs):
            self._rows.invalidate()
            self.decoding[:] = [r for r in self.decoding if r.finish is None]
            self.prefilling[:] = [r for r in self.prefilling if r.finish is None]
        if any(req.slot < 0 for req in reqs):
            self.waiting[:] = [r for r in self.waiting if r.finish is None]
        for req in reqs:
            if req.slot >= 0:
                self._release(req, keep=keep)
                if keep:
                    self._keep_cached(req)
            else:
                self._admission.forget(req)
            self._forget(req)

    def _release(self, req: Req, *, keep: bool = True) -> None:
        if req.adapter is not None:
            req.adapter.running -= 1
        self.ledger.release(req, computed_len=self._computed_len(req) if keep else 0)
        if self.limits.draft_width:
            self._departed.append(DepartedRequest(req.uid, req.known_len))

    def _computed_len(self, req: Req) -> int:
        """Return the number of tokens of ``req`` whose pages other requests may read."""
        return self._plans.computed_len(req) if self.limits.fails_late else req.cached_len

    def _keep_cached(self, req: Req) -> None:
        """Pin the tokens of a request that has ended, which are in the cache, for its group and for the next request of
        its session."""
        self.groups.computed(req, req.cached_len)
        if req.session:
            self.pins.keep(PinKey("session", req.namespace, req.session), req.token_ids[: req.known_len])

    def _forget(self, req: Req) -> None:
        del self._by_rid[req.rid]
        if req.adapter is not None:
            req.adapter.requests -= 1

    def page_counts(self) -> PageCounts:
        """Return how the pages of all pools are used now."""
        total, used, cached = 0, 0, 0
        for ledger, pins in zip(self.ledger.members, self.pins.members, strict=True):
            unread = pins.count_unread([r for r in self.running if self.ledger.of(r) is ledger])
            evictable = [own + more for own, more in zip(ledger.cache.evictable, unread, strict=True)]
            total, used = total + ledger.allocator.num_total, used + ledger.allocator.used(evictable)
            cached += ledger.cache.total[0]
        return PageCounts(total, used, cached, self.pins.pages)

    def check_integrity(self) -> None:
        """Assert that queues, slots and pages are consistent. The loop calls this when it is idle."""
        self.ledger.check_integrity(self.running)
        self.pins.check_integrity()
        for req in self.running:
            assert 0 <= req.cached_len <= req.device_len <= req.max_device_len + 1, req.rid
            assert req.num_pages * self.ledger.page_size >= req.cached_len, req.rid


def _pins_of(
    limits: SchedulerLimits, ledger: PageLedger | PoolLedgers, totals: Totals, clock: Clock
) -> Pins | PoolPins:
    """Return the pins of the prefix caches, which are released when their pool lacks pages."""
    members = [Pins(limits, member, totals, clock) for member in ledger.members]
    for member, pins in zip(ledger.members, members, strict=True):
        member.release_pinned = pins.release_pinned
    return members[0] if len(members) == 1 else PoolPins(members)

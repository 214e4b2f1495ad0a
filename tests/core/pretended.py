"""Pretend to be a device that remembers which token each location of the pool holds, and drive schedulers. The
device's next token is a hash of the whole text, read back through the page table: a page that is lost, shared wrongly,
freed too early or written by two requests shows up as a wrong token."""

import itertools
import time
import zlib

import numpy as np

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext
from dovetail.interfaces.policy import PolicyContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.lookahead import with_lookahead
from dovetail.memory.pools import PoolLedgers
from dovetail.memory.table import RequestTable, pool_of
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import AdmittedRequest, Batch, DraftTree, PageUpdates, SharedPrefixes, StepResult
from dovetail_cache.config import NoneConfig, RadixConfig
from dovetail_cache.none import NoCache
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

VOCAB, EOS, CONTEXT = 50, 7, 120


def next_token(text):
    """Return the token that the pretended model predicts after ``text``."""
    return zlib.crc32(np.asarray(text, np.int32).tobytes()) % VOCAB


def reqs_of(scheduler, plan):
    """Return the requests of the rows of a plan that is neither committed nor failed."""
    return scheduler._plans.reqs_of(plan)


def result_of(rows):
    """Return the result of a step whose sampled rows got the tokens ``rows``. The space after them holds -1, which is no
    token."""
    width = max(map(len, rows), default=1)
    tokens = np.full((len(rows), width), -1, np.int64)
    for row, new in enumerate(rows):
        tokens[row, : len(new)] = new
    return StepResult(tokens, np.array([len(new) for new in rows], np.int64) if width > 1 else None)


ARRAYS = {
    "slots": (np.int32, "rows"),
    "prefix_lens": (np.int32, "rows"),
    "extend_lens": (np.int32, "rows"),
    "samples": (np.bool_, "rows"),
    "known_lens": (np.int32, "num_extend"),
    "draft_limits": (np.int32, "rows"),
}


def check_types(plan):
    """Check that a plan has nothing but numbers, arrays of numbers, and structs of these."""
    sizes = {"rows": len(plan.slots), "num_extend": plan.num_extend}
    for name, (dtype, size) in ARRAYS.items():
        array = getattr(plan, name)
        if array is None and name == "draft_limits":
            continue
        assert type(array) is np.ndarray, name
        assert (array.dtype, array.shape) == (dtype, (sizes[size],)), name
    assert (type(plan.number), type(plan.num_extend), type(plan.rows_version)) == (int, int, int)
    assert type(plan.constrained) is bool
    assert type(plan.page_updates) is PageUpdates
    slots, columns, pages, version = plan.page_updates
    assert type(version) is int
    assert {slots.dtype, columns.dtype, pages.dtype} == {np.dtype(np.int32)}
    assert slots.shape == columns.shape == pages.shape[1:]
    assert type(plan.admitted) is tuple
    assert all(type(r) is AdmittedRequest and type(r.token_ids) is np.ndarray for r in plan.admitted)
    assert type(plan.shared) in (type(None), SharedPrefixes)
    assert type(plan.drafts) in (type(None), DraftTree)


class Device:
    """Hold a pool of locations with one token each and a separate page table, which the updates of plans fill. All that
    it knows of requests is what plans contain. It checks that plans come in their order and keep their contract."""

    def __init__(self, num_slots, max_pages, num_pages, page_size, num_pools=1):
        self.table = np.zeros((num_slots + 1, max_pages), np.int64)
        self.num_pools, self.pool_size = num_pools, num_pages * page_size
        self.places = np.full(num_pools * self.pool_size, -1)
        self.last = np.zeros(num_slots + 1, np.int64)
        self.page_size = page_size
        self.number = 0  # of the plan that was received last
        self.slots = {}  # requests that have a slot
        self.unseen = set()  # uids that were admitted in a plan that has not reached the device
        self.versions = {}  # the uids of the rows of plans with a number

    def receive(self, plan):
        """Admit the requests of a plan and take its page updates. Return its batch, which is what a drafter gets."""
        if plan.number != self.number:
            assert plan.number == self.number + 1, "plans are numbered one after another"
            self.number = plan.number
            self._admit(plan.admitted)
            slots, columns, pages, _ = plan.page_updates
            self.table[slots, columns] = pages[0]
            check_types(plan)
        requests = [self.slots[slot] for slot in plan.slots.tolist()]
        self._check_rows(plan, requests)
        return Batch.of(plan, requests)

    def miss(self, plan):
        """Lose a plan, as if the connection had failed. The caller takes the plan back."""
        self.number = plan.number
        self.unseen |= {request.uid for request in plan.admitted}

    def _admit(self, requests):
        for request in requests:
            others = [slot for slot, held in self.slots.items() if held.uid == request.uid]
            assert request.retracted or not others, "a request gets another slot only after a retraction"
            for slot in others:
                del self.slots[slot]
            assert 0 < request.slot < len(self.table)
            assert request.prompt_len <= request.known_len <= len(request.token_ids)
            assert request.retracted or request.known_len == request.prompt_len
            self.slots[request.slot] = request

    def depart(self, request):
        """Forget a request, as a drafter does."""
        held = [slot for slot, admitted in self.slots.items() if admitted.uid == request.uid]
        assert len(held) == 1 or request.uid in self.unseen, "a request departs once"
        self.unseen.discard(request.uid)
        for slot in held:
            assert self.slots[slot].known_len <= request.known_len <= len(self.slots[slot].token_ids)
            del self.slots[slot]

    def _check_rows(self, plan, requests):
        ends = plan.prefix_lens + plan.extend_lens
        assert len(set(plan.slots.tolist())) == len(requests), "a request has one row"
        assert len(plan.known_lens) == plan.num_extend
        for row, (request, end) in enumerate(zip(requests, ends.tolist(), strict=True)):
            if row < plan.num_extend:
                assert request.prompt_len <= plan.known_lens[row] <= len(request.token_ids)
                assert end <= plan.known_lens[row], "a token enters before it is known"
                generates = request.prompt_len < len(request.token_ids)
                assert plan.samples[row] == (generates and end == plan.known_lens[row])
            else:
                assert plan.samples[row]
        assert plan.constrained or not any(r.constrained for r in itertools.compress(requests, plan.samples))
        if plan.rows_version:
            uids = [r.uid for r in requests]
            assert self.versions.setdefault(plan.rows_version, uids) == uids, "rows with one number are the same"

    def forward(self, plan):
        batch = self.receive(plan)
        if batch.shared is not None:
            self.check_shared(batch)
        rows = []
        for row, req in enumerate(batch.reqs):
            start, count, slot = int(batch.prefix_lens[row]), int(batch.extend_lens[row]), int(batch.slots[row])
            drafts = batch.drafts.row(row)[0] if batch.drafts else []
            new = [self.last[slot], *drafts] if row >= batch.num_extend else req.token_ids[start : start + count]
            if row >= batch.num_extend and batch.draft_limits is not None:
                assert req.token_ids[start] == new[0], "the host knows the last token of a step that can have drafts"
            where = np.arange(start + count)
            where = self.table[slot, where // self.page_size] * self.page_size + where % self.page_size
            assert (where >= self.page_size).all(), "page 0 belongs to no request"
            assert (where < self.pool_size).all(), "pages are those of one pool"
            where += pool_of(slot, self.num_pools) * self.pool_size
            self.places[where[start:]] = new
            if batch.samples[row]:
                text = self.places[where]
                tokens = [next_token(text[: len(text) - len(drafts)])]
                for i, draft in enumerate(drafts):
                    if draft != tokens[-1]:
                        break
                    tokens.append(next_token(text[: len(text) - len(drafts) + i + 1]))
                self.last[slot] = tokens[-1]
                rows.append([int(t) for t in tokens])
        return result_of(rows)

    def check_shared(self, batch):
        """Check that groups cover the rows one after another, and that all rows of a group have the shared tokens where
        the group reads them."""
        starts, lens = batch.shared.starts.tolist(), batch.shared.lens.tolist()
        assert batch.num_extend == 0
        assert batch.shared.saved > 0
        assert (starts[0], starts[-1], len(starts)) == (0, len(batch.reqs), len(lens) + 1)
        for start, stop, length in zip(starts, starts[1:], lens, strict=False):
            assert (length == 0) == (stop - start == 1)
            assert length % self.page_size == 0
            assert length < (batch.prefix_lens + batch.extend_lens)[start:stop].min()
            self.check_pages(batch, start, stop, length)

    def check_pages(self, batch, start, stop, length):
        """Check that the rows of a group have its tokens in the same pages."""
        rows = self.table[batch.slots[start:stop], : length // self.page_size]
        assert (rows == rows[0]).all()


def build(page_size=4, num_pages=40, cache="radix", clock=time.monotonic, pools=1, **limits):
    """Return a scheduler and a device with ``pools`` pools of ``num_pages``."""
    settings = {
        "max_running": 5,
        "max_waiting": 100,
        "chunk_size": 9,
        "context_len": CONTEXT,
        "vocab_size": VOCAB,
        "reuses_prefixes": cache != "none",
    } | limits
    ahead = {"pairs": 1, "triples": 2}.get(cache, 0)
    kind, config = (NoCache, NoneConfig) if cache == "none" else (RadixCache, RadixConfig)
    table = RequestTable(np.zeros((1, settings["max_running"] + 1, -(-CONTEXT // page_size) + 1), np.int32), pools)
    caches = [
        with_lookahead(lambda context: kind(config(), context), CacheContext(page_size), ahead) for _ in range(pools)
    ]
    members = [
        PageLedger(PageAllocator(num_pages), index, table, page_size, ahead, pool=pool)
        for pool, index in enumerate(caches)
    ]
    ledger = members[0] if pools == 1 else PoolLedgers(members, table)
    policy = Fcfs(FcfsConfig(), PolicyContext(caches[0]))
    constraints = RequestConstraints(GrammarService(None), VOCAB, [EOS])
    scheduler = Scheduler(SchedulerLimits(**settings), ledger, policy, constraints, None, frozenset([EOS]), clock)
    return scheduler, Device(settings["max_running"], table.pages.shape[2], num_pages, page_size, pools)


class Run:
    """Drive a scheduler as the loop does, with or without a lag of one step, and check every output."""

    def __init__(self, scheduler, device, lag=False, drafts=None, ahead=False):
        self.scheduler, self.device, self.lag, self.drafts = scheduler, device, lag, drafts
        self.ahead, self.launched = ahead, None
        self.prompts, self.texts, self.ends, self.cached = {}, {}, {}, {}

    def add(self, rid, prompt, hints=None, **params):
        """Add a request; ``hints`` are further fields of its message."""
        self.prompts[rid], self.texts[rid] = list(prompt), list(prompt)
        self.scheduler.add(GenerateMsg(rid, list(prompt), SamplingParams(**params), seed=0, **(hints or {})))

    def take(self, answers):
        for answer in answers:
            assert isinstance(answer, TokenOutput)
            assert answer.rid not in self.ends
            self.cached[answer.rid] = answer.cached_tokens
            for token in answer.token_ids:
                assert token == next_token(self.texts[answer.rid]), f"{answer.rid} has wrong tokens"
                self.texts[answer.rid].append(token)
            if answer.finish is not None:
                self.ends[answer.rid] = answer.finish.kind

    def step(self):
        plan = self.scheduler.schedule()
        for departed in self.scheduler.take_departed():
            self.device.depart(departed)
        if plan is not None:
            batch = self.device.receive(plan)
            assert [r.uid for r in batch.reqs] == [r.uid for r in reqs_of(self.scheduler, plan)]
            if plan.draft_limits is not None:
                self.check_draft_limits(plan)
            if self.drafts and plan.num_extend < len(plan.slots):
                self.scheduler.attach(plan, self.drafts(batch))
        result = self.device.forward(plan) if plan is not None else None
        if self.ahead:
            self.scheduler.reserve_ahead()
        if self.lag:
            (plan, result), self.launched = self.launched or (None, None), (plan, result)
        if plan is not None:
            self.commit(plan, result)
        self.scheduler.check_integrity()
        self.check_rows()

    def commit(self, plan, result):
        """Commit a step, and check what a drafter learns of it."""
        reqs = reqs_of(self.scheduler, plan)
        self.take(self.scheduler.commit(plan, result))
        committed = self.scheduler.committed()
        assert committed.known_lens.tolist() == [r.known_len for r in reqs]
        assert committed.ended.tolist() == [r.rid in self.ends for r in reqs]
        assert (committed.known_lens.dtype, committed.ended.dtype) == (np.int32, np.bool_)

    def check_draft_limits(self, plan):
        """Check that each row has as many drafts as it requested, or as its pages can hold."""
        width, page_size = self.scheduler.limits.draft_width, self.scheduler.ledger.page_size
        limits, reqs = plan.draft_limits.tolist(), reqs_of(self.scheduler, plan)
        assert not any(limits[: plan.num_extend])
        for req, found in list(zip(reqs, limits, strict=True))[plan.num_extend :]:
            pages = req.num_pages * page_size - (req.device_len - 1)
            assert found == min(req.remain_len, req.draft_len, width, pages), req.rid

    def check_rows(self):
        """Check that what the scheduler keeps of the decode rows between steps agrees with their requests."""
        rows = self.scheduler._rows.rows
        if rows is not None and not self.lag:
            assert rows.lens.tolist() == [r.device_len for r in rows.reqs]
            assert rows.remain.tolist() == [r.remain_len for r in rows.reqs]
            assert rows.capacity.tolist() == [r.num_pages * rows.page_size for r in rows.reqs]
            assert rows.draft_lens.tolist() == [r.draft_len for r in rows.reqs]
            assert not rows.reqs or rows.steps_left <= min(rows.remain)
            assert not rows.reqs or rows.spare <= min(rows.capacity - rows.lens)

    @property
    def busy(self):
        return self.scheduler.has_work or (self.launched is not None and self.launched[0] is not None)

    def finish_requests(self, bound=5000):
        for _ in range(bound):
            if not self.busy:
                break
            self.step()
        assert not self.busy, "the scheduler does not finish"

    def finish(self, bound=5000):
        """Run until all requests have ended, and check that all pages are free again."""
        self.finish_requests(bound)
        ledger = self.scheduler.ledger
        self.scheduler.release_pins()
        assert all(member.available == member.allocator.num_total for member in ledger.members)
        assert ledger.table.num_free == self.scheduler.limits.max_running


def half_right(batch):
    """Return drafts of which some are the tokens that the device will predict."""
    rows, width = len(batch.reqs), 3
    ids, lens = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row in range(batch.num_extend, rows):
        req = batch.reqs[row]
        text = req.token_ids[: batch.prefix_lens[row] + 1].tolist()
        lens[row] = min(width, int(batch.draft_limits[row]))
        for i in range(lens[row]):
            text.append(next_token(text) if (req.uid + len(text)) % 3 else 1)
            ids[row, i] = text[-1]
    return DraftTree(ids, np.tile(np.arange(-1, width - 1, dtype=np.int32), (rows, 1)), lens)

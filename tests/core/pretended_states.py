"""Pretend to be a device that runs models with states: each slot holds the hash of the tokens that have passed through it.
A copy that is missing, wrong or too late, and a slot with two owners, show up as a wrong hash."""

import random
import time
import zlib

import numpy as np
from pretended import CONTEXT, EOS, VOCAB, Device, Run, next_token, reqs_of, result_of

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor
from dovetail.interfaces.executor import ArenaLayout
from dovetail.interfaces.policy import PolicyContext
from dovetail.memory.arena import ArenaAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.lookahead import with_lookahead
from dovetail.memory.pools import PoolLedgers
from dovetail.memory.table import RequestTable, pool_of
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import DraftTree, FinishKind, StateCopies
from dovetail_cache.config import NoneConfig, RadixConfig
from dovetail_cache.none import NoCache
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

FULL = GroupDescriptor(num_bytes=4)
WINDOW = GroupDescriptor(CacheGroupKind.SLIDING, 10, num_bytes=8)
LATENT = GroupDescriptor(CacheGroupKind.LATENT, num_bytes=4)
STATE = GroupDescriptor(CacheGroupKind.STATE, num_bytes=40)
MODELS = {
    "states": (STATE,),
    "full": (FULL, STATE),
    "before": (STATE, FULL),
    "window": (WINDOW, STATE),
    "latent": (LATENT, STATE, STATE),
    "all": (STATE, FULL, WINDOW, STATE),
}
STATELESS = {"pages": (FULL,), "sliding": (WINDOW,), "latents": (LATENT,), "pages and windows": (FULL, WINDOW)}
PAGES = {CacheGroupKind.FULL: (6, 8), CacheGroupKind.LATENT: (6, 6), CacheGroupKind.SLIDING: (3, 4)}
SLOTS = 2  # of a slab


def layout_of(groups, slabs):
    """Return a layout of ``slabs`` slabs besides slab 0."""
    sizes = [PAGES.get(group.kind, (SLOTS, SLOTS)) for group in groups]
    states = tuple(number for number, group in enumerate(groups) if not group.paged)
    return ArenaLayout(slabs + 1, 48, tuple(pages for pages, _ in sizes), tuple(blocks for _, blocks in sizes), states)


def hash_of(tokens, before=0):
    """Return the state after more tokens."""
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes(), before)


class StateDevice(Device):
    """Keep the hash of each slot of each pool besides the tokens of the pages of the first paged group."""

    def __init__(self, max_running, max_pages, groups, layout, page_size, num_pools=1):
        self.paged = layout.paged
        most = layout.num_slabs * max(layout.blocks)
        super().__init__(max_running, max_pages, most, page_size, num_pools)
        self.hashes = np.full((num_pools, len(layout.states), most), -1, np.int64)
        self.windows = [groups[group].window for group in self.paged]
        self.tables = np.zeros((len(self.paged), *self.table.shape), np.int64)
        self.memories = np.full((num_pools, len(self.paged), most * page_size), -1)
        self.copies, self.saves = np.zeros(num_pools, np.int64), 0
        self.shared = 0  # tokens of shared prefixes that need not be read
        self.shared_windows = 0  # rows that saw shared tokens within a window
        self.state_chunk = 0
        self.texts = {}  # by uid

    def receive(self, plan):
        fresh = plan.number != self.number
        slots, columns, pages, _ = plan.page_updates
        if fresh and len(slots):
            self.tables[:, slots, columns] = pages
        updates = plan.page_updates
        if not self.paged:  # the table of the base class has one group
            plan.page_updates = updates._replace(pages=np.zeros((1, len(slots)), np.int32))
        batch = super().receive(plan)
        plan.page_updates = updates
        if fresh and plan.state_copies is not None:
            self.copy(plan.state_copies)
        return batch

    def pool(self, slot):
        """Return the number of the pool that keeps the request in a slot."""
        return int(pool_of(slot, self.num_pools))

    def copy(self, copies):
        assert type(copies) is StateCopies
        assert {array.dtype for array in copies} == {np.dtype(np.int32)}
        groups, sources, targets, pools = copies
        assert ((pools >= 0) & (pools < self.num_pools)).all()
        assert (sources > 0).all()
        assert (targets > 0).all()
        places = set(zip(pools.tolist(), groups.tolist(), targets.tolist(), strict=True))
        assert len(places) == len(groups), "two copies to one slot"
        self.hashes[pools, groups, targets] = self.hashes[pools, groups, sources]
        self.copies += np.bincount(pools, minlength=self.num_pools)

    def forward(self, plan):
        batch = self.receive(plan)
        if batch.shared is not None:
            self.check_shared(batch)
            self.shared += batch.shared.saved
        rows, groups = [], np.arange(self.hashes.shape[1])
        used = [(self.pool(req.slot), *slot) for req in batch.reqs for slot in enumerate(req.state_slots)]
        assert len(set(used)) == len(used), "two rows have one slot"
        for row, req in enumerate(batch.reqs):
            start, count, slot = int(batch.prefix_lens[row]), int(batch.extend_lens[row]), int(batch.slots[row])
            drafts = batch.drafts.row(row)[0] if batch.drafts else []
            new = [self.last[slot], *drafts] if row >= batch.num_extend else req.token_ids[start : start + count]
            new = [int(token) for token in new]
            working = np.array(req.state_slots, np.int64)
            assert len(working) == len(groups)
            assert (working > 0).all()
            text = np.array(self.texts[req.uid][:start]) if row >= batch.num_extend else req.token_ids[:start]
            before = hash_of(text)
            if start:
                found = self.hashes[self.pool(slot), groups, working]
                assert (found == before).all(), f"row {row}: not the state after {start} tokens"
            self.write(slot, text, new)
            accepted = [next_token([*text, new[0]])] if row >= batch.num_extend else [next_token([*text, *new])]
            for i, draft in enumerate(drafts):
                if draft != accepted[-1]:
                    break
                accepted.append(next_token([*text, *new[: i + 2]]))
            kept = new[: len(accepted)] if row >= batch.num_extend else new
            self.save(plan, row, new, before)
            self.hashes[self.pool(slot), groups, working] = hash_of(kept, before)
            self.texts[req.uid] = [*text, *kept, accepted[-1]]
            if batch.samples[row]:
                self.last[slot] = accepted[-1]
                rows.append(accepted)
        return result_of(rows)

    def check_pages(self, batch, start, stop, length):
        """Check that the pages of the shortest row have what each row sees of the shared tokens, in every group of pages."""
        slot = batch.slots[start + int(batch.prefix_lens[start:stop].argmin())]
        where = np.arange(length)
        for table, memory, window in zip(self.tables, self.memories[self.pool(slot)], self.windows, strict=True):
            places = table[slot, where // self.page_size] * self.page_size + where % self.page_size
            for row in range(start, stop):
                first = 0 if window is None else max(0, int(batch.prefix_lens[row]) - window + 1)
                text = np.asarray(self.texts[batch.reqs[row].uid][:length])
                assert (places[first:] >= self.page_size).all(), "page 0 belongs to no request"
                assert (memory[places[first:]] == text[first:]).all(), "a shared page has other tokens"
                self.shared_windows += window is not None and first < length

    def save(self, plan, row, new, before):
        """Keep the states within a prompt."""
        if plan.state_saves is None:
            return
        assert {array.dtype for array in plan.state_saves} == {np.dtype(np.int32)}
        for at, length, group, target in np.stack(plan.state_saves, 1).tolist():
            if at == row:
                assert row < plan.num_extend
                assert 0 < length < len(new)
                assert length % self.state_chunk == 0
                assert target > 0
                self.hashes[self.pool(plan.slots[row]), group, target] = hash_of(new[:length], before)
                self.saves += 1

    def write(self, slot, text, new):
        """Write the tokens ``new`` to the pages of a row, and check what its next token sees of ``text``."""
        end = len(text) + len(new)
        for table, memory, window in zip(self.tables, self.memories[self.pool(slot)], self.windows, strict=True):
            first = 0 if window is None else max(0, len(text) - window + 1)
            where = np.arange(end)
            where = table[slot, where // self.page_size] * self.page_size + where % self.page_size
            assert (where[first:] >= self.page_size).all(), "page 0 belongs to no request"
            assert (memory[where[first : len(text)]] == np.asarray(text)[first:]).all(), "a page has other tokens"
            memory[where[len(text) :]] = new

    def fail(self, plan):
        """Fail in the middle of a plan: what it would write is unknown."""
        batch = self.receive(plan)
        for req in batch.reqs:
            working = np.array(req.state_slots, np.int64)
            self.hashes[self.pool(req.slot), np.arange(len(working)), working] = -7
        copies, saves = plan.state_copies, plan.state_saves
        if copies is not None:
            self.hashes[copies.pools, copies.groups, copies.targets] = -7
        if saves is not None:
            self.hashes[pool_of(plan.slots[saves.rows], self.num_pools), saves.groups, saves.targets] = -7


def build(model="full", slabs=14, page_size=4, cache="radix", clock=time.monotonic, pools=1, **limits):
    """Return a scheduler and a device of a model of ``MODELS`` or ``STATELESS``, with ``pools`` pools of ``slabs``."""
    groups = (MODELS | STATELESS)[model]
    settings = {
        "max_running": 5,
        "max_waiting": 100,
        "chunk_size": 9,
        "context_len": CONTEXT,
        "vocab_size": VOCAB,
        "reuses_prefixes": cache != "none",
    } | limits
    kind, config = (NoCache, NoneConfig()) if cache == "none" else (RadixCache, RadixConfig())
    ahead = 1 if cache == "pairs" else 0
    caches = [
        with_lookahead(lambda context: kind(config, context), CacheContext(page_size, groups), ahead)
        for _ in range(pools)
    ]
    layout = layout_of(groups, slabs)
    rows, columns = settings["max_running"] + 1, -(-CONTEXT // page_size) + 1
    table = RequestTable(np.zeros((len(layout.paged), rows, columns), np.int32), pools)
    members = [
        PageLedger(ArenaAllocator(layout), index, table, page_size, ahead, groups, pool)
        for pool, index in enumerate(caches)
    ]
    ledger = members[0] if pools == 1 else PoolLedgers(members, table)
    policy = Fcfs(FcfsConfig(), PolicyContext(caches[0]))
    constraints = RequestConstraints(GrammarService(None), VOCAB, [EOS])
    scheduler = Scheduler(SchedulerLimits(**settings), ledger, policy, constraints, None, frozenset([EOS]), clock)
    device = StateDevice(settings["max_running"], columns, groups, layout, page_size, pools)
    device.state_chunk = settings.get("state_chunk", 0)
    return scheduler, device


class Forced:
    """Accept every token, as the matcher of a constraint."""

    is_terminated = False

    def accept(self, token_id):
        return True


class Jumps(RequestConstraints):
    """Force, now and then, some of the tokens that the pretended model would generate."""

    jumps = True

    def __init__(self, rng):
        super().__init__(GrammarService(None), VOCAB, [EOS])
        self.rng = rng

    def forced_tokens(self, req):
        if not isinstance(req.matcher, Forced) or self.rng.random() < 0.7:
            return []
        text = req.token_ids[: req.known_len].tolist()
        for _ in range(self.rng.randrange(1, 12)):
            text.append(next_token(text))
        return text[req.known_len : req.max_device_len]


class StateRun(Run):
    """Drive a scheduler of a model with states. A part ``failures`` of the steps fail."""

    def __init__(self, scheduler, device, lag=False, drafts=None, ahead=False, failures=0.0, seed=0):
        super().__init__(scheduler, device, lag, drafts, ahead)
        self.failures, self.random = failures, random.Random(seed)

    def check_draft_limits(self, plan):
        """Check that a row has fewer drafts than it may only to stop at a full page."""
        page_size = self.scheduler.ledger.page_size
        ends = plan.prefix_lens + 1 + plan.draft_limits
        plan.draft_limits, limits = (
            np.array(
                [
                    min(
                        r.remain_len,
                        r.draft_len,
                        self.scheduler.limits.draft_width,
                        r.num_pages * page_size - r.device_len + 1,
                    )
                    if row >= plan.num_extend and end % page_size == 0
                    else limit
                    for row, (r, end, limit) in enumerate(
                        zip(reqs_of(self.scheduler, plan), ends.tolist(), plan.draft_limits.tolist(), strict=True)
                    )
                ],
                np.int32,
            ),
            plan.draft_limits,
        )
        assert (plan.draft_limits >= limits).all()
        super().check_draft_limits(plan)
        plan.draft_limits = limits

    def step(self):
        if self.random.random() >= self.failures:
            super().step()
            return
        plan = self.scheduler.schedule()
        if plan is not None:
            if self.random.random() < 0.5:
                self.device.miss(plan)
            else:
                self.device.fail(plan)
            self.scheduler.take_back(plan)
        launched, self.launched = self.launched, None
        if launched is not None and launched[0] is not None:
            self.commit(*launched)
        if plan is not None:
            for answer in self.scheduler.fail(plan, "out of order"):
                self.ends[answer.rid] = FinishKind.ERROR
        self.scheduler.check_integrity()


def right_and_wrong(device, rng, width):
    """Return a drafter of chains, whose drafts are right up to a random place."""

    def propose(batch):
        lens = np.zeros(len(batch.reqs), np.int32)
        tokens = np.zeros((len(batch.reqs), width), np.int32)
        for row, req in enumerate(batch.reqs):
            if row < batch.num_extend:
                continue
            lens[row] = most = min(width, int(batch.draft_limits[row])) if batch.draft_limits is not None else 0
            text, good = [*req.token_ids[: int(batch.prefix_lens[row]) + 1].tolist()], rng.randrange(width + 1)
            for i in range(most):
                token = next_token(text)
                tokens[row, i] = token if i < good else (token + 1) % VOCAB
                text.append(int(tokens[row, i]))
        return DraftTree.chains(tokens, lens)

    return propose

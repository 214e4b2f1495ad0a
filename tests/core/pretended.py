"""Pretend to be a device that remembers which token each location of the pool holds, and drive schedulers. The
device's next token is a hash of the whole text, read back through the page table: a page that is lost, shared wrongly,
freed too early or written by two requests shows up as a wrong token."""

import time
import zlib

import numpy as np

from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.policy import PolicyContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.lookahead import with_lookahead
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg, TokenOutput
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import DraftTree, HostOutput
from dovetail_cache.config import NoneConfig, RadixConfig
from dovetail_cache.none import NoCache
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

VOCAB, EOS, CONTEXT = 50, 7, 120


def next_token(text):
    """Return the token that the pretended model predicts after ``text``."""
    return zlib.crc32(np.asarray(text, np.int32).tobytes()) % VOCAB


class Device:
    """Hold a pool of locations with one token each and a separate page table, which the batches' updates fill."""

    def __init__(self, num_slots, max_pages, num_pages, page_size):
        self.table = np.zeros((num_slots + 1, max_pages), np.int64)
        self.places = np.full(num_pages * page_size, -1)
        self.last = np.zeros(num_slots + 1, np.int64)
        self.page_size = page_size

    def forward(self, batch):
        slots, columns, pages, _ = batch.page_updates
        self.table[slots, columns] = pages[0]
        if batch.shared is not None:
            self.check_shared(batch)
        rows = []
        for row, req in enumerate(batch.reqs):
            start, count, slot = int(batch.prefix_lens[row]), int(batch.extend_lens[row]), int(batch.slots[row])
            drafts = batch.drafts.token_ids[row, : batch.drafts.lens[row]].tolist() if batch.drafts else []
            new = [self.last[slot], *drafts] if row >= batch.num_extend else req.token_ids[start : start + count]
            where = np.arange(start + count)
            where = self.table[slot, where // self.page_size] * self.page_size + where % self.page_size
            assert (where >= self.page_size).all(), "page 0 belongs to no request"
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
        return HostOutput(rows)

    def check_shared(self, batch):
        """Check that groups cover the rows one after another, and that the rows of a group have its tokens in the same
        pages."""
        starts, lens = batch.shared.starts.tolist(), batch.shared.lens.tolist()
        assert batch.num_extend == 0
        assert batch.shared.saved > 0
        assert (starts[0], starts[-1], len(starts)) == (0, len(batch.reqs), len(lens) + 1)
        for start, stop, length in zip(starts, starts[1:], lens, strict=False):
            assert (length == 0) == (stop - start == 1)
            assert length % self.page_size == 0
            assert length < (batch.prefix_lens + batch.extend_lens)[start:stop].min()
            rows = self.table[batch.slots[start:stop], : length // self.page_size]
            assert (rows == rows[0]).all()


def build(page_size=4, num_pages=40, cache="radix", clock=time.monotonic, **limits):
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
    index = with_lookahead(lambda context: kind(config(), context), page_size, ahead)
    table = RequestTable(settings["max_running"], -(-CONTEXT // page_size) + 1)
    ledger = PageLedger(PageAllocator(num_pages), index, table, page_size, ahead)
    policy = Fcfs(FcfsConfig(), PolicyContext(index))
    constraints = RequestConstraints(GrammarService(None), VOCAB, [EOS])
    scheduler = Scheduler(SchedulerLimits(**settings), ledger, policy, constraints, None, frozenset([EOS]), clock)
    return scheduler, Device(settings["max_running"], table.pages.shape[2], num_pages, page_size)


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
        batch = self.scheduler.schedule()
        if batch is not None and batch.draft_limits is not None:
            self.check_draft_limits(batch)
        if batch is not None and self.drafts and batch.num_extend < len(batch.reqs):
            self.scheduler.attach(batch, self.drafts(batch))
        output = self.device.forward(batch) if batch is not None else None
        if self.ahead:
            self.scheduler.reserve_ahead()
        if self.lag:
            (batch, output), self.launched = self.launched or (None, None), (batch, output)
        if batch is not None:
            self.take(self.scheduler.commit(batch, output))
        self.scheduler.check_integrity()
        self.check_rows()

    def check_draft_limits(self, batch):
        """Check that each row has as many drafts as it requested, or as its pages can hold."""
        width, page_size = self.scheduler.limits.draft_width, self.scheduler.ledger.page_size
        limits = batch.draft_limits.tolist()
        assert not any(limits[: batch.num_extend])
        for req, found in list(zip(batch.reqs, limits, strict=True))[batch.num_extend :]:
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
        assert ledger.available == ledger.allocator.num_total
        assert ledger.table.num_free == self.scheduler.limits.max_running


def half_right(batch):
    """Return drafts of which some are the tokens that the device will predict."""
    rows, width = len(batch.reqs), 3
    ids, lens = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row in range(batch.num_extend, rows):
        req = batch.reqs[row]
        text = req.token_ids[: req.known_len].tolist()
        lens[row] = min(width, int(batch.draft_limits[row]))
        for i in range(lens[row]):
            text.append(next_token(text) if (req.uid + len(text)) % 3 else 1)
            ids[row, i] = text[-1]
    return DraftTree(ids, np.tile(np.arange(-1, width - 1, dtype=np.int32), (rows, 1)), lens)

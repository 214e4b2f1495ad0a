"""The scheduler against a pretended device that remembers which token every place of the pool holds.

The device's next token is a hash of the whole text, read back through the page table: a page that is lost, shared
wrongly, freed too early or written by two requests shows up as a wrong token.

    .venv/bin/python -m pytest -q tests/core/test_scheduler.py
"""

import random
import zlib

import numpy as np
import pytest

from dovetail.errors import ContextLengthError, QueueFullError, RequestError
from dovetail.interfaces.cache import CacheContext
from dovetail.interfaces.policy import PolicyContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg, RequestFailed, TokenOutput
from dovetail.scheduler.grammar import GrammarService
from dovetail.scheduler.limits import Limits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import DraftTree, FinishKind, HostOutput, SamplingParams
from dovetail_cache.config import NoneConfig, RadixConfig
from dovetail_cache.none import NoCache
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

VOCAB, EOS, CONTEXT = 50, 7, 120


def next_token(text):
    """What the pretended model says after ``text``."""
    return zlib.crc32(np.asarray(text, np.int32).tobytes()) % VOCAB


class Device:
    """A pool of places that hold tokens, and a page table of its own, fed by the batches' updates."""

    def __init__(self, num_slots, max_pages, num_pages, page_size):
        self.table = np.zeros((num_slots + 1, max_pages), np.int64)
        self.places = np.full(num_pages * page_size, -1)
        self.last = np.zeros(num_slots + 1, np.int64)
        self.page_size = page_size

    def forward(self, batch):
        slots, columns, pages = batch.page_updates
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
            assert (where >= self.page_size).all(), "page 0 belongs to nobody"
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
        """Groups cover the rows one after another, and each has its tokens in the same pages."""
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


def build(page_size=4, num_pages=40, cache="radix", **limits):
    settings = {
        "max_running": 5,
        "max_waiting": 100,
        "chunk_size": 9,
        "context_len": CONTEXT,
        "vocab_size": VOCAB,
        "wait_for_prefix": cache == "radix",
    } | limits
    context = CacheContext(page_size)
    index = RadixCache(RadixConfig(), context) if cache == "radix" else NoCache(NoneConfig(), context)
    table = RequestTable(settings["max_running"], -(-CONTEXT // page_size) + 1)
    ledger = PageLedger(PageAllocator(num_pages), index, table, page_size)
    policy = Fcfs(FcfsConfig(), PolicyContext(index))
    scheduler = Scheduler(Limits(**settings), ledger, policy, GrammarService(None), None, frozenset([EOS]))
    return scheduler, Device(settings["max_running"], table.pages.shape[2], num_pages, page_size)


class Run:
    """Drives a scheduler like the loop does, with or without a lag of one step, and checks every answer."""

    def __init__(self, scheduler, device, lag=False, drafts=None, ahead=False):
        self.scheduler, self.device, self.lag, self.drafts = scheduler, device, lag, drafts
        self.ahead, self.launched = ahead, None
        self.prompts, self.texts, self.ends = {}, {}, {}

    def add(self, rid, prompt, **params):
        self.prompts[rid], self.texts[rid] = list(prompt), list(prompt)
        self.scheduler.add(GenerateMsg(rid, list(prompt), SamplingParams(**params), seed=0))

    def take(self, answers):
        for answer in answers:
            assert isinstance(answer, TokenOutput)
            assert answer.rid not in self.ends
            for token in answer.token_ids:
                assert token == next_token(self.texts[answer.rid]), f"{answer.rid} went astray"
                self.texts[answer.rid].append(token)
            if answer.finish is not None:
                self.ends[answer.rid] = answer.finish.kind

    def step(self):
        batch = self.scheduler.schedule()
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

    def check_rows(self):
        """What is kept of the decode rows from step to step is what their requests say."""
        rows = self.scheduler._rows
        if rows is not None and not self.lag:
            assert rows.lens.tolist() == [r.device_len for r in rows.reqs]
            assert rows.remain.tolist() == [r.remain_len for r in rows.reqs]
            assert rows.capacity.tolist() == [r.num_pages * rows.page_size for r in rows.reqs]
            assert rows.draft_lens.tolist() == [r.draft_len for r in rows.reqs]
            assert not rows.reqs or rows.steps_left == min(rows.remain)

    @property
    def busy(self):
        return self.scheduler.has_work or (self.launched is not None and self.launched[0] is not None)

    def finish(self, bound=5000):
        for _ in range(bound):
            if not self.busy:
                break
            self.step()
        assert not self.busy, "the scheduler does not come to an end"
        ledger = self.scheduler.ledger
        assert ledger.available == ledger.allocator.num_total
        assert ledger.table.num_free == self.scheduler.limits.max_running


def half_right(batch):
    """Drafts of which some are what the device will say."""
    rows, width = len(batch.reqs), 3
    ids, lens = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
    for row in range(batch.num_extend, rows):
        req = batch.reqs[row]
        text = req.token_ids[: req.known_len].tolist()
        lens[row] = min(width, int(batch.draft_room[row]))
        for i in range(lens[row]):
            text.append(next_token(text) if (req.uid + len(text)) % 3 else 1)
            ids[row, i] = text[-1]
    return DraftTree(ids, np.tile(np.arange(-1, width - 1, dtype=np.int32), (rows, 1)), lens)


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("cache", ["radix", "none"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_in_little_memory(page_size, cache, lag, seed):
    rng = random.Random(seed)
    limits = {"mixed": bool(seed % 2), "chunk_size": rng.choice([3, 9, 64])}
    limits["wait_for_prefix"] = seed < 2 and cache == "radix"
    limits["shared_prefixes"] = cache == "radix"
    scheduler, device = build(page_size, 1 + 160 // page_size, cache, **limits)
    run = Run(scheduler, device, lag)
    stems = [[rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
    for i in range(40):
        prompt = rng.choice(stems)[: rng.randrange(41)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 20))]
        run.add(f"r{i}", prompt, max_new_tokens=rng.randrange(1, 40), ignore_eos=rng.random() < 0.7)
        for _ in range(rng.randrange(3)):
            run.step()
        if rng.random() < 0.2:
            run.take(scheduler.abort(f"r{rng.randrange(i + 1)}", "changed my mind"))
    run.finish()
    assert set(run.ends) == set(run.prompts)
    for rid, kind in run.ends.items():
        if kind is FinishKind.STOP:
            assert run.texts[rid][-1] == EOS


@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(4))
def test_drafts_in_little_memory(page_size, seed, ahead):
    rng = random.Random(seed)
    scheduler, device = build(page_size, 1 + 160 // page_size, draft_width=3, adapt_drafts=bool(seed % 2))
    run = Run(scheduler, device, drafts=half_right, ahead=ahead)
    for i in range(20):
        run.add(
            f"r{i}", [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))], max_new_tokens=rng.randrange(1, 40)
        )
        run.step()
    run.finish()
    totals = scheduler.totals
    assert 0 < totals.accepted_tokens < totals.drafted_tokens


@pytest.mark.parametrize("page_size", [1, 4])
def test_nobody_goes_for_the_sake_of_drafts(page_size):
    """Drafts become fewer as pages run out; a request goes only when there is no page left for the tokens themselves."""
    scheduler, device = build(page_size, 1 + 112 // page_size, "none", draft_width=3)
    rooms = []

    def noted(batch):
        if not scheduler.totals.retractions:
            rooms.extend(zip(batch.draft_room.tolist(), (r.remain_len for r in batch.reqs), strict=True))
        return half_right(batch)

    run = Run(scheduler, device, drafts=noted, ahead=True)
    for i in range(2):
        run.add(f"r{i}", [i] * 20, max_new_tokens=60, ignore_eos=True)
    while not scheduler.totals.retractions:
        needed = sum(scheduler.ledger.pages_for(r.known_len) for r in scheduler.running)
        run.step()
    assert needed > 112 // page_size, "pages reserved for drafts could have done"
    assert {room for room, remain in rooms if remain > 8} >= {0, 3}
    run.finish()


def lengths_in_order(drafts, draft_width):
    """Ids and lengths of the decode rows of each step, in their order, while four requests decode together."""
    scheduler, device = build(chunk_size=200, num_pages=200, draft_width=draft_width)
    run = Run(scheduler, device, drafts=drafts)
    for i, length in enumerate((20, 24, 10, 23)):
        run.add(f"r{i}", [i] * length, max_new_tokens=60, ignore_eos=True)
    run.step()
    seen = []
    while len(scheduler.decoding) == 4:
        rows = scheduler._decode_rows().reqs
        seen.append(([r.rid for r in rows], [r.device_len for r in rows]))
        run.step()
    return seen


def test_decode_rows_stand_in_order_of_length():
    steps = lengths_in_order(None, 0)
    assert [rids for rids, _ in steps] == [["r1", "r3", "r0", "r2"]] * len(steps)


def test_drafts_do_not_change_the_order_of_rows():
    """They let one row overtake another; but what the sampler holds on the device goes by the order of the rows."""

    def for_one(batch):
        tree = half_right(batch)
        tree.lens[[req.rid != "r2" for req in batch.reqs]] = 0
        return tree

    steps = lengths_in_order(for_one, 3)
    assert [rids for rids, _ in steps] == [["r1", "r3", "r0", "r2"]] * len(steps)
    assert any(lens != sorted(lens, reverse=True) for _, lens in steps), "nobody has overtaken anybody"


def test_memory_pressure_retracts_and_everybody_still_finishes():
    scheduler, device = build(num_pages=32)
    run = Run(scheduler, device)
    for i in range(5):
        run.add(f"r{i}", [i] * 20, max_new_tokens=90, ignore_eos=True)
    run.finish()
    assert scheduler.totals.retractions > 0
    assert all(len(run.texts[f"r{i}"]) == 110 for i in range(5))


def test_the_oldest_request_is_never_retracted():
    scheduler, device = build(num_pages=32)
    run = Run(scheduler, device)
    for i in range(5):
        run.add(f"r{i}", [i] * 20, max_new_tokens=90, ignore_eos=True)
    first = scheduler.waiting[0]
    run.finish()
    assert first.num_retractions == 0


def test_a_shared_prefix_is_computed_once():
    scheduler, device = build()
    run = Run(scheduler, device)
    for i in range(4):
        run.add(f"r{i}", [*range(20, 40), i], max_new_tokens=2, ignore_eos=True)
    run.finish()
    assert scheduler.totals.cached_tokens == 3 * 20


@pytest.mark.parametrize("lag", [False, True])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_prefix_computed_twice_is_kept_once(page_size, lag):
    scheduler, device = build(page_size, 60 * 4 // page_size, wait_for_prefix=False, chunk_size=64)
    run = Run(scheduler, device, lag)
    for rid in "abc":
        run.add(rid, range(20, 40), max_new_tokens=12, ignore_eos=True)
    run.step()
    for rid in "de":
        run.add(rid, range(5), max_new_tokens=30, ignore_eos=True)
    run.finish()
    assert scheduler.ledger.cache.total_pages <= (20 + 12 + 5 + 30) // page_size


def test_the_next_turn_finds_the_last_answer_too():
    scheduler, device = build(page_size=1)
    run = Run(scheduler, device)
    run.add("first", range(20, 40), max_new_tokens=10, ignore_eos=True)
    run.finish()
    run.add("second", [*run.texts["first"], 1, 2], max_new_tokens=1)
    run.finish()
    assert scheduler.totals.cached_tokens == 29


def test_namespaces_do_not_share():
    scheduler, device = build()
    run = Run(scheduler, device)
    for namespace in ("a", "b"):
        prompt = list(range(20, 40))
        run.prompts[namespace] = run.texts[namespace] = prompt
        scheduler.add(GenerateMsg(namespace, prompt, SamplingParams(max_new_tokens=1), 0, namespace))
    run.finish()
    assert scheduler.totals.cached_tokens == 0


def test_a_failed_step_ends_its_requests_and_frees_their_pages():
    scheduler, device = build()
    run = Run(scheduler, device)
    run.add("a", range(20), max_new_tokens=5)
    run.add("b", range(9), max_new_tokens=5)
    batch = scheduler.schedule()
    answers = scheduler.fail(batch.reqs, "out of luck")
    assert [(a.rid, a.status) for a in answers if isinstance(a, RequestFailed)] == [(r.rid, 500) for r in batch.reqs]
    run.ends.update({a.rid: FinishKind.ERROR for a in answers})
    run.finish()


@pytest.mark.parametrize(
    ("prompt", "params", "error", "text"),
    [
        ([], {}, RequestError, "prompt is empty"),
        ([VOCAB], {}, RequestError, "token ids must be in"),
        ([-1], {}, RequestError, "token ids must be in"),
        ([1] * CONTEXT, {}, ContextLengthError, f"prompt has {CONTEXT} tokens"),
        ([1] * 100, {"max_new_tokens": 21}, ContextLengthError, "at most 20 new tokens fit"),
        ([1], {"logit_bias": {VOCAB: 1.0}}, RequestError, "vocabulary size"),
        ([1], {"stop": ("x",)}, RequestError, "tokenizer"),
    ],
)
def test_refused_requests_leave_nothing_behind(prompt, params, error, text):
    scheduler, _ = build()
    with pytest.raises(error, match=text):
        scheduler.add(GenerateMsg("r", prompt, SamplingParams(**params), 0))
    assert not scheduler.has_work
    scheduler.check_integrity()


def test_queue_bound_and_repeated_ids():
    scheduler, _ = build(max_waiting=1)
    scheduler.add(GenerateMsg("a", [1], SamplingParams(), 0))
    with pytest.raises(RequestError, match="already in use"):
        scheduler.add(GenerateMsg("a", [1], SamplingParams(), 0))
    with pytest.raises(QueueFullError, match=r"scheduler\.max_waiting"):
        scheduler.add(GenerateMsg("b", [1], SamplingParams(), 0))


@pytest.mark.parametrize(
    "bad",
    [
        {"min_new_tokens": 1, "max_new_tokens": 0},
        {"max_new_tokens": -1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"n": 0},
        {"seed": 1.5},
        {"top_k": -2},
        {"min_new_tokens": 5, "max_new_tokens": 2},
        {"logprobs": True},
    ],
)
def test_sampling_params_say_what_is_allowed(bad):
    with pytest.raises(RequestError, match=r"is .*; allowed: "):
        SamplingParams(**bad)

"""Test jump-forward in the scheduler, with a toy tokenizer and a pretended device whose model obeys the grammar.

.venv/bin/python -m pytest -q tests/core/test_jump_forward.py
"""

import random
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dovetail.constraints.jump_forward import JumpForward
from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.interfaces.cache import CacheContext
from dovetail.interfaces.grammar import Matcher
from dovetail.interfaces.policy import PolicyContext
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.table import RequestTable
from dovetail.messages import GenerateMsg
from dovetail.sampling_params import SamplingParams
from dovetail.scheduler.limits import SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler
from dovetail.types import FinishKind, Req
from dovetail_cache.config import RadixConfig
from dovetail_cache.radix import RadixCache
from dovetail_policies.config import FcfsConfig
from dovetail_policies.simple import Fcfs

sys.path.insert(0, str(Path(__file__).parent))
from pretended import result_of

EOS = 0
WORDS = [None, *(c.encode() for c in 'abcdefgh{}": ,1'), b"ab", b"abc", b'":', b'{"', b'",']
CHOICES = "abc1"


class ToyTokenizer:
    """Tokenize by longest match from the left."""

    token_bytes = WORDS
    eos_token_ids = (EOS,)

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        data, ids = text.encode(), []
        while data:
            fits = [i for i, w in enumerate(WORDS) if w and data.startswith(w)]
            if not fits:
                return [*ids, len(WORDS) + 9]
            ids.append(max(fits, key=lambda i: len(WORDS[i])))
            data = data[len(WORDS[ids[-1]]) :]
        return ids


def text_of(ids):
    return b"".join(WORDS[i] or b"" for i in ids).decode()


class Template(Matcher):
    """Force a text except for each ``?``, which is one of CHOICES; then comes the end."""

    def __init__(self, template):
        self.template, self.said = template, []

    @property
    def rest(self):
        return self.template[len(text_of(self.said)) :]

    def accept(self, token_id):
        if token_id == EOS:
            ok = not self.rest and EOS not in self.said
        else:
            word, rest = (WORDS[token_id] or b"\xff").decode(errors="replace"), self.rest
            ok = len(word) <= len(rest) and all(
                (r == "?" and w in CHOICES) or r == w for w, r in zip(word, rest, strict=False)
            )
        if ok:
            self.said.append(token_id)
        return ok

    def fill_bitmask(self, bitmask, row):
        raise NotImplementedError

    def rollback(self, num_tokens):
        raise NotImplementedError

    @property
    def is_terminated(self):
        return EOS in self.said

    def jump_forward(self):
        return self.rest.split("?")[0]


class Device:
    """Remember which token each location of the pool holds, and predict a token that the grammar allows, by a hash of
    the text."""

    def __init__(self, slots, width, pages, page_size):
        self.table = np.zeros((slots + 1, width), np.int64)
        self.places, self.last = np.full(pages * page_size, -1), np.zeros(slots + 1, np.int64)
        self.page_size, self.steps = page_size, 0
        self.requests = {}

    def forward(self, plan, canonical):
        self.steps += 1
        assert plan.number == self.steps
        assert plan.constrained == bool(plan.samples.any()) or plan.num_extend
        self.requests |= {request.slot: request for request in plan.admitted}
        assert all(request.constrained for request in plan.admitted)
        slots, columns, pages, _ = plan.page_updates
        self.table[slots, columns] = pages[0]
        rows = []
        for row, slot in enumerate(plan.slots.tolist()):
            req, start, count = self.requests[slot], int(plan.prefix_lens[row]), int(plan.extend_lens[row])
            assert row >= plan.num_extend or start + count <= plan.known_lens[row]
            new = [self.last[slot]] if row >= plan.num_extend else req.token_ids[start : start + count]
            where = np.arange(start + count)
            where = self.table[slot, where // self.page_size] * self.page_size + where % self.page_size
            assert (where >= self.page_size).all(), "page 0 belongs to no request"
            self.places[where[start:]] = new
            if plan.samples[row]:
                text = self.places[where].tolist()
                assert text == req.token_ids[: len(text)].tolist(), "the pool holds another text"
                self.last[slot] = canonical(req, text[req.prompt_len :])
                rows.append([int(self.last[slot])])
        return result_of(rows)


def model(template, salt):
    """Choose tokens as the tokenizer would write the text, whose free characters are a hash of the text so far."""
    text = "".join(
        CHOICES[zlib.crc32(f"{salt}{i}".encode()) % len(CHOICES)] if c == "?" else c for i, c in enumerate(template)
    )
    ids = [*ToyTokenizer().encode(text, add_special_tokens=False), EOS]
    return lambda said: ids[len(said)] if said == ids[: len(said)] and EOS not in said else None


def build(jump, page_size=4, pages=60, **limits):
    values = {
        "max_running": 4,
        "max_waiting": 99,
        "chunk_size": 7,
        "context_len": 120,
        "vocab_size": len(WORDS),
    } | limits
    cache = RadixCache(RadixConfig(), CacheContext(page_size))
    table = RequestTable(np.zeros((1, values["max_running"] + 1, -(-values["context_len"] // page_size) + 1), np.int32))
    ledger = PageLedger(PageAllocator(pages), cache, table, page_size)
    scheduler = Scheduler(
        SchedulerLimits(**values),
        ledger,
        Fcfs(FcfsConfig(), PolicyContext(cache)),
        RequestConstraints(GrammarService(None), len(WORDS), [EOS], ToyTokenizer() if jump else None),
        ToyTokenizer(),
        frozenset([EOS]),
    )
    return scheduler, Device(values["max_running"], table.pages.shape[2], pages, page_size)


def drive(scheduler, device, jobs, lag, aborts=(), rng=None):
    """Run jobs ``(template, params)`` to their ends. Return the tokens of each, and the reason why it ended."""
    models, tokens, ends, reqs = {}, {}, {}, {}
    for i, (template, params) in enumerate(jobs):
        prompt = [1 + (7 * j + i % 3) % 12 for j in range(3 + i % 17)]
        req = scheduler.add(GenerateMsg(f"r{i}", prompt, params, 0))
        req.matcher, reqs[req.rid] = Template(template), req
        models[req.rid], tokens[req.rid] = model(template, i % 5), []

    def canonical(req, said):
        token = models[f"r{req.uid}"](said)
        return EOS if token is None else token

    def take(answers):
        for answer in answers:
            assert answer.rid not in ends
            tokens[answer.rid] += answer.token_ids
            assert answer.completion_tokens == len(tokens[answer.rid])
            if answer.finish is not None:
                ends[answer.rid] = answer.finish

    launched = None
    for step in range(4000):
        if not scheduler.has_work and launched is None:
            break
        plan = scheduler.schedule()
        if plan is not None and not lag:
            take(scheduler.commit(plan, device.forward(plan, canonical)))
        elif lag:
            # the tokens of the decode rows are on the device; those of the last step are reported to the host now
            pending = launched
            if pending is not None:
                take(scheduler.commit(*pending))
            launched = (plan, device.forward_late(plan, canonical)) if plan is not None else None
        if step in aborts:
            take(scheduler.abort(rng.choice(list(reqs)), "gone"))
        scheduler.check_integrity()
    assert not scheduler.has_work
    assert not scheduler.running
    assert scheduler.ledger.available == scheduler.ledger.allocator.num_total
    for rid, req in reqs.items():
        assert req.output_ids.tolist() == tokens[rid]
        assert req.matcher.said == tokens[rid]
    return tokens, ends


class LateDevice(Device):
    """Compute after the step before was committed, so that the host's tokens may be ahead of a row."""

    def forward_late(self, plan, canonical):
        return self.forward(plan, canonical)


TEMPLATES = st.lists(st.sampled_from(['{"', "ab", "?", '": ', "c", '",', "abc", "??", "}"]), min_size=1, max_size=14)


@settings(max_examples=60)
@given(st.lists(TEMPLATES.map("".join), min_size=1, max_size=9), st.integers(2, 40), st.booleans(), st.integers(9, 60))
def test_text_and_state_are_as_without(templates, most, lag, pages):
    jobs = [(t, SamplingParams(max_new_tokens=most + i)) for i, t in enumerate(templates)]
    found, steps = [], []
    for jump in (False, True):
        scheduler, device = build(jump, pages=max(pages, 16))
        device.__class__ = LateDevice
        found.append(drive(scheduler, device, jobs, lag))
        steps.append(device.steps)
    assert found[0] == found[1]
    assert steps[1] <= steps[0] + len(jobs)


def test_a_forced_text_takes_few_steps_and_is_counted():
    jobs = [('{"abc": "?abcabc", "gfedcba": "?"}', SamplingParams(max_new_tokens=90))]
    for lag in (False, True):
        (plain, device), (jumping, faster) = build(False), build(True)
        device.__class__ = faster.__class__ = LateDevice
        assert drive(plain, device, jobs, lag) == drive(jumping, faster, jobs, lag)
        assert plain.totals.jumped_tokens == 0
        assert jumping.totals.jumped_tokens >= 15
        assert device.steps - faster.steps >= jumping.totals.jumped_tokens - 4
        assert plain.totals.generated_tokens == jumping.totals.generated_tokens


@pytest.mark.parametrize("lag", [False, True])
def test_little_memory_and_aborts_in_the_middle(lag):
    rng = random.Random(3)
    pieces = ['{"', "ab", "?", '": ', "c", '",', "abc", "gfedcba"]
    jobs = [("".join(rng.choices(pieces, k=16)), SamplingParams(max_new_tokens=60)) for _ in range(40)]
    scheduler, device = build(True, pages=24)
    device.__class__ = LateDevice
    tokens, ends = drive(scheduler, device, jobs, lag, aborts=range(5, 200, 9), rng=rng)
    full, whole = build(False, pages=600)
    whole.__class__ = LateDevice
    expected, _ = drive(full, whole, jobs, False)
    assert scheduler.totals.retractions > 0
    assert scheduler.totals.jumped_tokens > 0
    for rid, end in ends.items():
        if end.kind is FinishKind.ABORT:
            assert expected[rid][: len(tokens[rid])] == tokens[rid]
        else:
            assert expected[rid] == tokens[rid]


def jumps(template, said, **params):
    req = Req("r", np.zeros(60, np.int32), 2, SamplingParams(**params))
    req.matcher = Template(template)
    assert all(map(req.matcher.accept, said))
    req.known_len = 2 + len(said)
    req.token_ids[2 : req.known_len] = said
    return JumpForward(ToyTokenizer()).forced_tokens(req)


def ids(text):
    return ToyTokenizer().encode(text, add_special_tokens=False)


def test_what_is_jumped_is_what_the_tokenizer_writes():
    assert jumps('{"fed": ?', ids('{"')) == ids("fed") + ids('":')  # the model samples the last token, a space
    assert jumps("fedab?", ids("f")) == ids("ed")  # "ab" may become "abc"
    assert jumps("gabc?", [*ids("g"), *ids("a")]) == []  # the tokenizer would not have written "a" alone
    assert jumps("?fed", ids("")) == []


def test_no_jump_where_a_token_would_miss_its_logprobs_or_bias():
    said = ids('{"')
    assert jumps('{"fed": ?', said, logprobs=0) == []
    assert jumps('{"fed": ?', said, logit_bias={3: 1.0}) == []


def test_a_jump_has_no_more_tokens_than_the_request_may_get():
    req = Req("r", np.zeros(5, np.int32), 2, SamplingParams())
    req.matcher = Template("ghgfghghgf")
    assert req.matcher.accept(ids("g")[0])
    req.token_ids[2], req.known_len = ids("g")[0], 3
    assert JumpForward(ToyTokenizer()).forced_tokens(req) == ids("hg")

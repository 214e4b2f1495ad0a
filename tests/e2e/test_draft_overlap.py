"""Test drafts with overlap: messages arrive while a step with drafts is in flight, no request's text changes, and
nothing is lost.

.venv/bin/python -m pytest -q tests/e2e/test_draft_overlap.py
"""

import dataclasses
import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import drafter_checkpoints as checkpoints
import mtp_dflash_checkpoints as more_checkpoints
import numpy as np
import pytest
import torch
from engine_runs import VOCAB, Traffic, TreeDrafter, check_idle, drafting, make_llm, paged, prompts_of, varied_params
from safetensors.torch import load_file, save_file

from dovetail import LLM, SamplingParams
from dovetail.messages import AbortAllMsg, FlushCacheMsg, GenerateMsg, StatsRequestMsg
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail.scheduler import admission
from dovetail.testing.drafter import text_of
from dovetail.types import FinishKind, ForwardOutput

DRAFTERS = {
    "ngram": {"kind": "ngram", "min_ngram": 1, "max_ngram": 2},
    "draft_model": {"kind": "draft_model", "chunk_size": 32},
    "eagle3": {"kind": "eagle3"},
    "eagle3_tree": {"kind": "eagle3_tree", "topk": 2, "depth": 3, "num_draft_tokens": 5},
    "mtp": {"kind": "mtp", "num_draft_tokens": 4},
    "dflash": {"kind": "dflash"},
    "random trees": "none",
}
CUTS = {
    "pages": paged(16, 240, scheduler={"chunk_size": 50, "max_running": 8}),
    "pages of one": paged(1, 150, scheduler={"chunk_size": 11, "max_running": 8}),
    "switched": paged(1, 150, scheduler={"chunk_size": 30, "max_running": 8, "draft": "adaptive"}),
}
GENERATED = 7
"""The number of tokens that the models generate: drafts of random weights are right now and then."""
NO_LUCK = RuntimeError("out of luck")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Save a target with a checkpoint for each drafter in its folder."""
    directory = checkpoints.save_target(tmp_path_factory.mktemp("target") / "target", eos_token_id=GENERATED - 1)
    checkpoints.save_eagle3(directory / "eagle3")
    checkpoints.save_target(directory / "draft_model", num_hidden_layers=6)
    more_checkpoints.add_mtp(directory, 1)
    more_checkpoints.save_dflash(directory / "dflash", hidden=48, head_dim=16, mask=VOCAB - 1)
    for folder in (directory, directory / "draft_model", directory / "eagle3"):
        tensors = load_file(folder / "model.safetensors")
        if "d2t" in tensors:
            tensors["d2t"].zero_()  # its vocabulary starts with the target's
            tensors["t2d"][:] = torch.arange(VOCAB) < len(tensors["d2t"])
        tensors["lm_head.weight"][GENERATED:] = 0
        tensors["lm_head.weight"][:GENERATED] *= 4
        save_file(tensors, folder / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def jobs():
    """Return prompts, some of which share a prefix or repeat themselves, and parameters of every sort."""
    rng, found = random.Random(5), []
    stems = prompts_of([40, 40], seed=6)
    for i in range(40):
        prompt = rng.choice(stems)[: rng.choice([0, 12, 40])] + prompts_of([rng.randrange(1, 30)], seed=100 + i)[0]
        greedy = SamplingParams(max_new_tokens=rng.choice([0, 1, 2, 30, 40]), temperature=0, ignore_eos=i % 2 == 0)
        prompt *= rng.choice([1, 2] if len(prompt) < 30 else [1])
        found.append((prompt, rng.choice([greedy, varied_params(rng)])))
    return found


def said_by(llm, jobs):
    prompts, params = zip(*jobs, strict=True)
    return [output.token_ids for output in llm.generate(list(prompts), list(params))]


@pytest.fixture(scope="module")
def said(target, jobs):
    """Return what the target generates without drafts and without overlap."""
    return said_by(make_llm(target, **paged(16, 20000)), jobs)


# -- what must hold at every step ------------------------------------------------------------------------------------


class Watch:
    """Check what a loop asks of its parts. Assertions in a drafter's methods are counted as its errors."""

    def __init__(self, llm, patch, chance, luck, error):
        """Let one call in ``luck[name]`` of the method of that name raise ``error``."""
        self.loop, self.patch, self.chance, self.luck, self.error = llm.loop, patch, chance, luck, error
        self.gone, self.late = set(), 0
        self.prompts = False  # a step with prompts was launched or read in this call of ``step``
        engine, drafter = llm.loop.executor.rank.engine, llm.loop.executor.rank.drafter
        for owner, name, check in (
            (engine, "wait", self.works),
            (engine, "launch", self.works),
            (engine, "sample", self.works),
            (drafter, "propose", self.proposes),
            (drafter, "observe", self.observes),
            (drafter, "forget", self.forgets),
            (llm.loop.adaptive_drafting, "record", self.notes),
        ):
            self.wrap(owner, name, check)

    def wrap(self, owner, name, check):
        inner = getattr(owner, name)

        def wrapped(*args):
            check(*args)
            if name in self.luck and not self.chance.randrange(self.luck[name]):
                raise self.error
            return inner(*args)

        self.patch.setattr(owner, name, wrapped)

    def works(self, batch, *_):
        self.prompts |= batch.num_extend > 0

    def notes(self, *_):
        assert not self.prompts, "a step with prompts was timed"

    def proposes(self, batch):
        running = {req.uid: req for req in self.loop.scheduler.running}
        for row, admitted in enumerate(batch.reqs):
            req = running[admitted.uid]
            assert req.finish is None
            assert req.slot == admitted.slot == batch.slots[row]
            assert text_of(batch, row) == req.token_ids[: req.known_len].tolist()

    def observes(self, batch, output, committed):
        """The pages of ended requests belong to no other request yet."""
        ledger, running = self.loop.scheduler.ledger, self.loop.scheduler.running
        own = [ledger.table.pages[0, req.slot, req.shared_pages : req.num_pages] for req in running]
        owned = set(np.concatenate([np.zeros(0, np.int32), *own]).tolist())
        known_lens = {req.uid: req.known_len for req in running}
        for row, req in enumerate(batch.reqs):
            assert committed.ended[row] == (req.uid not in known_lens)
            if not committed.ended[row]:
                assert req.slot == batch.slots[row]
                assert committed.known_lens[row] == known_lens[req.uid]
                continue
            end = int(batch.prefix_lens[row] + batch.extend_lens[row])
            assert owned.isdisjoint(
                self.loop.executor.rank.engine.inputs.page_table[batch.slots[row], : ledger.pages_for(end)]
            )
            self.late += req.uid in self.gone

    def forgets(self, request):
        """A request that has departed and not ended was retracted."""
        scheduler = self.loop.scheduler
        retracted = {req.uid for req in (*scheduler.waiting, *scheduler.running) if req.num_retractions}
        if request.uid not in retracted:
            assert request.uid not in self.gone
            self.gone.add(request.uid)

    def kept(self):
        """Return how much the drafter keeps of requests."""
        drafter = self.loop.executor.rank.drafter
        shared = getattr(getattr(drafter, "_shared", None), "_running", ())
        return len(shared) + sum(len(getattr(drafter, n, ())) for n in ("_observed", "_cursors", "_states"))


def compute_late(engine, patch):
    """Behave like a device that computes a step while the host handles messages: here, when the host at last waits for
    it."""
    forward, wait, pending = engine.forward, engine.wait, []

    def later(batch):
        pending.append((batch, ForwardOutput(torch.empty(0))))
        return pending[0][1]

    def waited(batch, output):
        while pending:
            launched, promised = pending.pop()
            found = forward(launched)
            for field in dataclasses.fields(found):
                setattr(promised, field.name, getattr(found, field.name))
        return wait(batch, output)

    patch.setattr(engine, "forward", later)
    patch.setattr(engine, "wait", waited)


class Mess(Traffic):
    """Send requests of every sort, abort some, continue some where they were aborted, and send commands in between."""

    def __init__(self, llm, watch, jobs, said, rng):
        super().__init__(llm)
        self.watch, self.jobs, self.said, self.rng = watch, jobs, said, rng
        self.expected, self.job_of, self.aborted = {}, {}, set()
        self.calls, self.before = Counter(), llm.loop.stats().generated_tokens

    def step(self):
        self.watch.prompts = False
        loop_step = self.loop.step
        replies = []

        def answers():
            try:
                found = loop_step()
            except KeyboardInterrupt:
                found = []
            replies.extend(answer.call_id for answer in found if hasattr(answer, "call_id"))
            return [answer for answer in found if hasattr(answer, "rid")]

        self.loop.step = answers
        try:
            super().step()
        finally:
            del self.loop.step
        self.calls.subtract(replies)
        self.loop.scheduler.check_integrity()

    def ask(self, i, **changes):
        prompt, params = self.jobs[i]
        rng, rid, common = self.rng, f"r{len(self.tokens)}", {}
        self.tokens[rid], self.expected[rid], self.job_of[rid] = [], self.said[i], i
        if rng.random() < 0.3:
            common |= {"group": f"g{i // 4}", "group_size": 3}
        if rng.random() < 0.3:
            common |= {"session": f"s{i % 5}"}
        params, seed = replace(params, seed=None, speculative=rng.random() < 0.9), params.seed or 0
        self.loop.handle(GenerateMsg(rid, prompt, params, seed, priority=rng.randrange(3), **common))

    def go_on(self, before):
        """Request the continuation of a text, or of a slightly longer one, which reads what is cached of it."""
        prompt, params = self.jobs[self.job_of[before]]
        have = self.expected[before][: len(self.tokens[before]) + self.rng.randrange(3)]
        left = len(self.expected[before]) - len(have)
        settings = {"max_new_tokens": params.max_new_tokens, "temperature": 0, "ignore_eos": params.ignore_eos}
        if have and left and params == SamplingParams(**settings):
            rid = f"r{len(self.tokens)}"
            self.tokens[rid], self.expected[rid] = [], self.expected[before][len(have) :]
            self.loop.handle(GenerateMsg(rid, prompt + have, SamplingParams(**settings | {"max_new_tokens": left}), 0))

    def abort_one(self):
        rid = self.rng.choice(list(self.tokens))
        self.abort(rid)
        if rid not in self.ends:
            self.aborted.add(rid)
            if rid in self.job_of:
                self.go_on(rid)

    def command(self):
        what = self.rng.randrange(3)
        if what:
            self.aborted |= self.tokens.keys() - self.ends.keys()
            self.loop.handle(AbortAllMsg())
        self.calls["flush"] += 1
        self.loop.handle(FlushCacheMsg("flush"))
        self.calls["stats"] += 1
        self.loop.handle(StatsRequestMsg("stats"))

    def run(self):
        rng = self.rng
        for i in rng.sample(range(len(self.jobs)), len(self.jobs)):
            self.ask(i)
            for _ in range(rng.choice([0, 0, 1, 2, 5])):
                self.step()
            if rng.random() < 0.25:
                self.abort_one()
            if rng.random() < 0.05:
                self.command()
        self.finish()
        self.check()

    def check(self):
        assert not any(self.calls.values())
        for rid, expected in self.expected.items():
            kind, tokens = self.kind(rid), self.tokens[rid]
            assert kind != FinishKind.ABORT or rid in self.aborted
            assert tokens == (expected[: len(tokens)] if kind in (FinishKind.ABORT, 500) else expected)
        stats = self.loop.stats()
        assert stats.generated_tokens - self.before == sum(map(len, self.tokens.values()))
        assert stats.accepted_tokens <= stats.drafted_tokens
        assert stats.verify_steps <= stats.drafted_tokens
        assert stats.draft_steps <= stats.steps
        assert not self.watch.kept()
        assert self.loop.scheduler.take_departed() == []


def trees_for(jobs, said):
    """Return a drafter of trees that knows the target's outputs and drafts them with some chance."""
    drafter = TreeDrafter(width=6)
    drafter.learn(SimpleNamespace(prompt_ids=p, token_ids=said[i]) for i, (p, _) in enumerate(jobs))
    return drafter


def run_mess(llm, jobs, said, monkeypatch, seed, *, drafter=None, luck=(), error=NO_LUCK):
    monkeypatch.setattr(admission, "DECODE_HEADROOM", 0)
    rng, luck = random.Random(seed), dict(luck)
    llm.loop.executor.rank.engine.pool.k.fill_(50.0)
    always = llm.loop.adaptive_drafting._always
    with drafting(llm, drafter or llm.loop.executor.rank.drafter), monkeypatch.context() as patch:
        if not luck:
            compute_late(llm.loop.executor.rank.engine, patch)
        watch = Watch(llm, patch, rng, luck, error)
        if not always:
            patch.setattr(llm.loop.adaptive_drafting, "should_draft", lambda rows: rng.random() < 0.6)
        mess = Mess(llm, watch, jobs, said, rng)
        mess.run()
    assert (llm.loop.drafter_errors > 0) == bool({"propose", "observe"} & luck.keys())
    stats = llm.loop.stats()
    assert stats.drafted_tokens > 0
    assert luck or not always or stats.accepted_tokens > 0
    assert not (watch.late and always), "the drafter was shown what it has forgotten"
    check_idle(llm)
    return mess


def engine_of(target, name, cut, **scheduler):
    sections = CUTS[cut] | {"speculative": DRAFTERS[name]}
    given = {"draft": "always", "overlap": True, "mixed": len(name) % 2 == 0} | sections.pop("scheduler") | scheduler
    return make_llm(target, **sections, scheduler=given)


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", DRAFTERS)
def test_random_traffic(target, jobs, said, monkeypatch, name, cut):
    drafter = trees_for(jobs, said) if name == "random trees" else None
    run_mess(engine_of(target, name, cut), jobs, said, monkeypatch, f"{name} {cut}", drafter=drafter)


@pytest.mark.parametrize("error", [NO_LUCK, KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("part", ["wait", "launch", "sample"])
def test_steps_that_fail_in_random_traffic(target, jobs, said, monkeypatch, part, error):
    name = {"wait": "eagle3_tree", "launch": "draft_model", "sample": "random trees"}[part]
    cut = "switched" if isinstance(error, KeyboardInterrupt) else "pages of one"
    drafter = trees_for(jobs, said) if name == "random trees" else None
    llm = engine_of(target, name, cut)
    mess = run_mess(llm, jobs, said, monkeypatch, part, drafter=drafter, luck={part: 20}, error=error)
    assert 500 in map(mess.kind, mess.ends)


@pytest.mark.parametrize(("name", "part"), [("ngram", "propose"), ("dflash", "observe"), ("eagle3", "propose")])
def test_a_drafter_that_raises_in_random_traffic(target, jobs, said, monkeypatch, name, part):
    run_mess(engine_of(target, name, "pages of one"), jobs, said, monkeypatch, part, luck={part: 9})


def constrained_jobs(tokenizer):
    """Return requests with grammars, with stop strings, and with several outputs of one prompt."""
    rng = random.Random(4)
    colour = GrammarSpec(GrammarKind.REGEX, r"(red|green|blue)( [0-9]{1,3}){2,9}\.")
    schema = '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "maximum": 999}}}'
    kinds = [
        {"grammar": colour},
        {"grammar": GrammarSpec(GrammarKind.JSON_SCHEMA, schema)},
        {"stop": ("a", "5 ", "xyz")},
        {},
    ]
    found = []
    for i in range(24):
        prompt = tokenizer.encode(f"Number these: 1 2 3 4 5 1 2 3 4 {rng.randrange(3)}", add_special_tokens=False)
        params = SamplingParams(max_new_tokens=30, temperature=rng.choice([0.0, 0.8, 1.5]), seed=i, **kinds[i % 4])
        found.append((prompt, params))
    return found


@pytest.mark.parametrize("draft", ["always", "adaptive"])
def test_constrained_requests_in_random_traffic(monkeypatch, draft):
    sections = {"device": "cpu", "threads": 1, "grammar": {"isolation": "thread"}}
    plain = LLM("tiny", **sections)
    jobs = constrained_jobs(plain.tokenizer)
    said = said_by(plain, jobs)
    plain.close()
    scheduler = {"overlap": True, "draft": draft, "max_running": 6}
    llm = LLM("tiny", **sections, **paged(1, 200, scheduler=scheduler), speculative="ngram")
    drafter = TreeDrafter(width=5, right=0.8, vocab=4096)
    drafter.learn(SimpleNamespace(prompt_ids=p, token_ids=said[i]) for i, (p, _) in enumerate(jobs))
    for seed, chosen in enumerate([None, drafter]):
        run_mess(llm, jobs, said, monkeypatch, seed, drafter=chosen)
        llm.loop.handle(FlushCacheMsg("between"))
        llm.loop.step()
    llm.close()


@pytest.mark.parametrize("page_size", [1, 4])
def test_all_that_is_cached_of_an_aborted_request_has_been_written(target, monkeypatch, page_size):
    """The last token that the request has received is in the step in flight, with drafts in a tree behind it."""
    prompt, params = prompts_of([9])[0], SamplingParams(max_new_tokens=80, temperature=0, ignore_eos=True)
    said = make_llm(target).generate(prompt, params)[0].token_ids
    scheduler = {"overlap": True, "draft": "always", "chunk_size": 5}
    llm = make_llm(target, **paged(page_size, 400, scheduler=scheduler))
    drafter = TreeDrafter(width=6, right=0.8)
    drafter.learn([SimpleNamespace(prompt_ids=prompt, token_ids=said)])
    lengths = set()
    with drafting(llm, drafter), monkeypatch.context() as patch:
        compute_late(llm.loop.executor.rank.engine, patch)
        for steps in range(1, 14):
            llm.loop.executor.rank.engine.pool.v[:, 1:] = float("nan")
            traffic = Traffic(llm)
            traffic.add("short", prompt, params)
            for _ in range(steps):
                traffic.step()
            assert llm.loop.has_step_in_flight
            traffic.abort("short")
            have = prompt + traffic.tokens["short"]
            lengths.add(len(have))
            behind = said[len(have) - len(prompt) :]
            traffic.add("longer", have + behind[:1], replace(params, max_new_tokens=12))
            cached = llm.loop.scheduler.totals.cached_tokens
            traffic.finish()
            assert traffic.tokens["longer"] == behind[1:13]
            known = len(have) if steps > 1 else 5
            assert llm.loop.scheduler.totals.cached_tokens - cached == known // page_size * page_size
            llm.loop.handle(FlushCacheMsg("flush"))
            llm.loop.step()
    assert len(lengths) > 5
    assert max(lengths) > 24, "drafts were accepted"
    check_idle(llm)

"""Make small engines and batches of varied requests, and check what must hold when engines are idle. The engine tests
share this module."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from dovetail import LLM, SamplingParams
from dovetail.interfaces.speculative import Drafter
from dovetail.memory.table import pool_of
from dovetail.messages import AbortMsg, GenerateMsg, RequestFailed, TokenOutput
from dovetail.types import DraftTree, FinishKind

VOCAB = 199


def make_llm(checkpoint, **sections) -> LLM:
    """Return an engine on the CPU, without grammar unless ``sections`` set one."""
    memory = {"page_size": 16, "num_pages": 200} | sections.pop("memory", {})
    return LLM(str(checkpoint), memory=memory, device="cpu", **({"grammar": "none"} | sections))


def paged(page_size, tokens=3200, **sections):
    """Return the sections of an engine whose pool holds ``tokens``."""
    return {"memory": {"page_size": page_size, "num_pages": 1 + tokens // page_size}} | sections


def prompts_of(lengths, seed=0, shared=0):
    """Return random prompts behind a shared prefix."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCAB, shared).tolist()
    return [prefix + rng.integers(0, VOCAB, n).tolist() for n in lengths]


def check_idle(llm: LLM) -> None:
    """Check that nothing is running and no page is lost."""
    loop = llm.loop
    assert not loop.has_work
    loop.scheduler.check_integrity()
    stats = loop.stats()
    assert (stats.pages_used, stats.running, stats.waiting) == (0, 0, 0)
    assert loop.scheduler.ledger.table.num_free == loop.scheduler.limits.max_running


class Traffic:
    """Drive a loop by messages and collect its outputs. Each request must end exactly once, and have no output after
    that."""

    def __init__(self, llm: LLM) -> None:
        self.loop = llm.loop
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, object] = {}

    def add(self, rid, prompt, params=None, seed=0):
        self.tokens[rid] = []
        self.loop.handle(GenerateMsg(rid, prompt, params or SamplingParams(), seed))

    def abort(self, rid):
        self.loop.handle(AbortMsg(rid))

    def step(self):
        for answer in self.loop.step():
            assert answer.rid not in self.ends, f"{answer} comes after {self.ends[answer.rid]}"
            if isinstance(answer, RequestFailed):
                self.ends[answer.rid] = answer
                continue
            assert isinstance(answer, TokenOutput)
            self.tokens[answer.rid] += answer.token_ids
            assert answer.completion_tokens == len(self.tokens[answer.rid])
            if answer.finish is not None:
                self.ends[answer.rid] = answer.finish

    def finish(self, bound=20000):
        for _ in range(bound):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "the loop does not come to an end"
        assert self.ends.keys() == self.tokens.keys()

    def kind(self, rid):
        end = self.ends[rid]
        return end.status if isinstance(end, RequestFailed) else end.kind


def check_with_aborts(llm: LLM, prompts, params, alone, chance) -> set[int]:
    """Add requests with up to three steps between them, and abort an earlier one with this ``chance`` after each. Check that some end
    early, and no others than aborted ones, that these generate a beginning of their tokens in ``alone`` and the others all of them, and
    that nothing is left behind. Return those of two ranks that kept requests, with data-parallel attention."""
    rng, used, aborted, traffic = random.Random(1), set(), set(), Traffic(llm)
    for i, (prompt, own) in enumerate(zip(prompts, params, strict=True)):
        traffic.add(f"r{i}", prompt, replace(own, seed=None), seed=own.seed or 0)
        for _ in range(rng.choice([0, 0, 1, 3])):
            traffic.step()
        used |= {pool_of(req.slot, 2) for req in llm.loop.scheduler.running}
        if rng.random() < chance:
            aborted.add(rid := f"r{rng.randrange(i + 1)}")
            traffic.abort(rid)
    traffic.finish()
    early = {rid for rid in traffic.tokens if traffic.kind(rid) == FinishKind.ABORT}
    assert early, "no request was aborted before its end"
    assert early <= aborted, "requests ended that were not aborted"
    for (rid, got), tokens in zip(traffic.tokens.items(), alone, strict=True):
        assert got == (tokens[: len(got)] if rid in early else tokens), f"{rid}: {got}, not {tokens}"
    check_idle(llm)
    return used


def varied_params(rng: random.Random, most=40) -> SamplingParams:
    """Return sampling parameters of every sort."""
    low = rng.choice([0, 0, 3])
    return SamplingParams(
        max_new_tokens=rng.randrange(max(low, 1), most),
        min_new_tokens=low,
        temperature=rng.choice([0.0, 0.7, 1.0, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 0, 20]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, -0.4]),
        logit_bias=rng.choice([None, {5: 3.0, 11: -100.0}]),
        stop_token_ids=rng.choice([(), (7, 30)]),
        logprobs=rng.choice([None, 0, 3]),
        prompt_logprobs=rng.choice([None, None, 1]),
        seed=rng.randrange(1 << 40),
    )


def results(outputs):
    """Return what must not depend on how the work was cut into steps."""
    return [(o.token_ids, o.text, o.finish, [e.token_id for e in o.logprobs]) for o in outputs]


class TreeDrafter(Drafter):
    """Draft random trees. With chance ``right`` a node is the token that follows its parent, otherwise any token.
    Siblings repeat each other, wrong nodes have right children, and the entries beyond a row's draft are junk.
    ``learn`` passes it the outputs that it drafts from."""

    def __init__(self, width=7, right=0.5, seed=0, chain=False, vocab=VOCAB):
        self.width, self.right, self.chain, self.vocab = width, right, chain, vocab
        self.rng = np.random.default_rng(seed)
        self.futures = {}
        self.departed = []

    @property
    def max_draft_tokens(self):
        return self.width

    def learn(self, outputs):
        """Store outputs of a prompt. Outputs of the same prompt differ by their seed, and any of them may be drafted."""
        for output in outputs:
            self.futures.setdefault(tuple(output.prompt_ids), []).append(output.token_ids)

    def propose(self, batch):
        rows = len(batch.slots)
        ids = self.rng.integers(-9, 10**6, (rows, self.width)).astype(np.int32)
        parents = self.rng.integers(-9, 10**6, (rows, self.width)).astype(np.int32)
        lens = np.zeros(rows, np.int32)
        for row in range(batch.num_extend, rows):
            lens[row] = self.rng.integers(0, min(self.width, batch.draft_limits[row]) + 1)
            self.fill(batch.reqs[row], batch.prefix_lens[row] + 1, ids[row], parents[row], int(lens[row]))
        return DraftTree(ids, parents, lens)

    def fill(self, req, known_len, ids, parents, count):
        futures = self.futures.get(tuple(req.token_ids[: req.prompt_len].tolist()), [[]])
        said = req.token_ids[req.prompt_len : known_len].tolist()
        future = next((f for f in futures if f[: len(said)] == said), futures[0])[len(said) :]
        depths = [0]
        for node in range(count):
            deep = self.chain or self.rng.random() < 0.6
            parents[node] = node - 1 if deep else self.rng.integers(-1, node)
            depths.append(depths[parents[node] + 1] + 1)
            known = depths[-1] <= len(future) and self.rng.random() < self.right
            ids[node] = future[depths[-1] - 1] if known else self.rng.integers(0, self.vocab)

    def forget(self, request):
        self.departed.append(request.uid)


@contextmanager
def drafting(llm, drafter):
    """Replace the engine's drafter with this one. It observes all steps."""
    loop, before, limits = llm.loop, llm.loop.executor.rank.drafter, llm.loop.scheduler.limits
    observes, loop._guard._observes = loop._guard._observes, True
    loop.executor.rank.drafter = drafter
    width = drafter.max_draft_tokens if drafter else 0
    loop.scheduler.limits = replace(limits, draft_width=width, draft_trees=True)
    yield
    loop.executor.rank.drafter, loop.scheduler.limits, loop._guard._observes = before, limits, observes

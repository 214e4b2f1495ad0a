"""Run workloads whose hits are known: which prefixes of the prompts are cached is computed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from dovetail.interfaces.cache import CacheContext, GroupDescriptor, PrefixCache
from dovetail.testing.cache_traffic import Traffic
from dovetail.types import IntArray

CHUNK = 2048
VOCAB = 32000
MakeCache = Callable[[CacheContext], PrefixCache]


class Hits(NamedTuple):
    """Hold the requests that found a prefix, those that could, and the part of all prompt tokens that was cached."""

    found: int
    possible: int
    rate: float


def shared_prefixes(make: MakeCache, groups: tuple[GroupDescriptor, ...], shared: int, count: int = 64) -> Hits:
    """Serve ``count`` requests that share their first ``shared`` tokens, and nothing after them."""
    rng = np.random.default_rng(shared)
    common = rng.integers(0, VOCAB, shared, dtype=np.int32)
    prompts = [np.concatenate([common, rng.integers(VOCAB, 2 * VOCAB, 300, dtype=np.int32)]) for _ in range(count)]
    return _serve(make, groups, prompts, [0] + [shared] * (count - 1))


def varying_prefixes(
    make: MakeCache, groups: tuple[GroupDescriptor, ...], around: int = 1500, by: int = 100, count: int = 64
) -> Hits:
    """Serve a long prompt, then ``count`` requests that share ``around`` tokens with it, more or less by up to ``by``."""
    rng = np.random.default_rng(around)
    base = rng.integers(0, VOCAB, around + by + 100, dtype=np.int32)
    lengths = rng.integers(around - by, around + by + 1, count).tolist()
    tails = [rng.integers(VOCAB, 2 * VOCAB, 200, dtype=np.int32) for _ in lengths]
    prompts = [base, *(np.concatenate([base[:n], tail]) for n, tail in zip(lengths, tails, strict=True))]
    return _serve(make, groups, prompts, [0, *lengths])


def agents(
    make: MakeCache,
    groups: tuple[GroupDescriptor, ...],
    sizes: tuple[int, ...],
    sessions: int = 128,
    turns: int = 6,
    running: int = 8,
    seed: int = 0,
) -> Hits:
    """Serve sessions that begin with the same 1,000 tokens and append turns of 200 to 600 tokens, ``running`` at a time.
    The next turn comes from a random session. ``sizes`` are the pages and snapshots of each group. ``rate`` counts the
    prompt tokens of all turns but the first of each session."""
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    context = CacheContext(16, groups)
    traffic = Traffic(make(context), context, sizes)
    system = numbers.integers(0, VOCAB, 1000, dtype=np.int32)
    texts = [system for _ in range(sessions)]
    order = [session for session in range(sessions) for _ in range(turns)]
    rng.shuffle(order)
    begun: set[int] = set()
    found = hit = prompts = 0
    active: dict[int, int] = {}
    while order or active:
        waiting = [session for session in order[: 4 * running] if session not in active]
        while waiting and len(active) < running:
            session = waiting.pop(0)
            order.remove(session)
            prompt = np.concatenate([texts[session], numbers.integers(0, VOCAB, rng.randint(200, 600), dtype=np.int32)])
            req = traffic.admit(prompt)
            if session in begun:
                found, hit, prompts = found + (req.hit > len(system)), hit + req.hit, prompts + len(prompt)
            texts[session] = prompt
            begun.add(session)
            active[session] = req.number
            waiting = [other for other in waiting if other != session]
        _advance(traffic, active)
    traffic.close()
    return Hits(found, sessions * (turns - 1), hit / prompts)


def _advance(traffic: Traffic, active: dict[int, int]) -> None:
    """Compute a chunk of each request. Those that lack pages are retracted: they begin again with what is cached."""
    for req in list(traffic.running):
        stop = req.common if traffic.states and req.computed < req.common else len(req.tokens)
        if not traffic.compute(req, min(req.computed + CHUNK, stop)):
            session = next(session for session, number in active.items() if number == req.number)
            traffic.stop(req)
            active[session] = traffic.admit(req.tokens).number
        elif req.computed == len(req.tokens):
            active.pop(next(session for session, number in active.items() if number == req.number))
            traffic.stop(req)


def _serve(make: MakeCache, groups: tuple[GroupDescriptor, ...], prompts: list[IntArray], shared: list[int]) -> Hits:
    context = CacheContext(16, groups)
    traffic = Traffic(make(context), context, tuple(20_000 for _ in groups))
    hits = [traffic.serve(prompt, CHUNK) for prompt in prompts]
    traffic.close()
    found = sum(0 < length // 16 * 16 <= hit for hit, length in zip(hits, shared, strict=True))
    return Hits(found, sum(length >= 16 for length in shared), traffic.hit_tokens / traffic.prompt_tokens)

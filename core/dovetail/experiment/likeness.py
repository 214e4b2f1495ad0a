"""How alike two distributions over the next token are, as far as their most likely tokens tell."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.types import TokenLogprob

_LEAST = 1e-12


@dataclass(frozen=True, slots=True)
class Likeness:
    """Over ``positions`` tokens: KL(A || B) in nats, the share whose most likely token is the same, the largest difference of
    the log-probability of A's most likely token (``shift``), and of the places where B's is another, the largest lead that A's
    had over it in A (``upset``)."""

    positions: int = 0
    kl_mean: float = 0.0
    kl_max: float = 0.0
    top1: float = 1.0
    shift: float = 0.0
    upset: float = 0.0


def likeness(pairs: Iterable[tuple[TokenLogprob, TokenLogprob]]) -> Likeness:
    """Of the same places of the same texts, in A and in B."""
    found = [(a, b) for a, b in pairs if a.top and b.top]
    if not found:
        return Likeness()
    kls = [kl(a, b) for a, b in found]
    upsets = [lead(a, b.top[0][0]) for a, b in found if a.top[0][0] != b.top[0][0]]
    shifts = [abs(a.top[0][1] - logprob_in(b, a.top[0][0])) for a, b in found]
    count = len(found)
    return Likeness(count, sum(kls) / count, max(kls), 1 - len(upsets) / count, max(shifts), max(upsets, default=0.0))


def kl(a: TokenLogprob, b: TokenLogprob) -> float:
    """KL(A || B) of one place, in nats, over the tokens that both name and everything else as one: never above the true one
    (data processing inequality)."""
    both = dict(b.top)
    shared = [(logprob, both[token]) for token, logprob in a.top if token in both]
    rest_a, rest_b = (max(1 - math.fsum(math.exp(pair[i]) for pair in shared), _LEAST) for i in (0, 1))
    total = math.fsum(math.exp(p) * (p - q) for p, q in shared) + rest_a * math.log(rest_a / rest_b)
    return max(total, 0.0)


def lead(a: TokenLogprob, token: int) -> float:
    """By how much the most likely token leads ``token``, in nats; of one that is not among the most likely, at least so much."""
    return a.top[0][1] - logprob_in(a, token)


def logprob_in(a: TokenLogprob, token: int) -> float:
    """The log-probability of ``token``; of one that is neither chosen nor among the most likely, that of the last of these,
    which is more."""
    if token == a.token_id and a.logprob is not None:
        return a.logprob
    return next((logprob for name, logprob in a.top if name == token), a.top[-1][1])

"""Compare two distributions over the next token by the log-probabilities of their most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from dovetail.types import TokenLogprob

_MIN_PROBABILITY = 1e-12


@dataclass(frozen=True, slots=True)
class Agreement:
    """Hold the comparison over ``positions`` tokens: the mean and largest KL(A || B) in nats, the share of positions with the same most
    likely token (``top1``), and the largest difference of the log-probability of A's most likely token (``shift``). ``max_lead`` is
    the largest lead, in A, of A's most likely token over B's, among the positions where these differ."""

    positions: int = 0
    kl_mean: float = 0.0
    kl_max: float = 0.0
    top1: float = 1.0
    shift: float = 0.0
    max_lead: float = 0.0


def agreement(pairs: Iterable[tuple[TokenLogprob, TokenLogprob]]) -> Agreement:
    """Compare pairs of A and B at the same positions of the same texts."""
    found = [(a, b) for a, b in pairs if a.top and b.top]
    if not found:
        return Agreement()
    kls = [kl(a, b) for a, b in found]
    leads = [lead(a, b.top[0][0]) for a, b in found if a.top[0][0] != b.top[0][0]]
    shifts = [abs(a.top[0][1] - logprob_in(b, a.top[0][0])) for a, b in found]
    count = len(found)
    return Agreement(count, sum(kls) / count, max(kls), 1 - len(leads) / count, max(shifts), max(leads, default=0.0))


def kl(a: TokenLogprob, b: TokenLogprob) -> float:
    """Return KL(A || B) at one position, in nats, over the tokens that both list and one event for all other tokens. The result is never
    above the true value (data processing inequality)."""
    both = dict(b.top)
    shared = [(logprob, both[token]) for token, logprob in a.top if token in both]
    rest_a, rest_b = (max(1 - math.fsum(math.exp(pair[i]) for pair in shared), _MIN_PROBABILITY) for i in (0, 1))
    total = math.fsum(math.exp(p) * (p - q) for p, q in shared) + rest_a * math.log(rest_a / rest_b)
    return max(total, 0.0)


def lead(a: TokenLogprob, token: int) -> float:
    """Return by how many nats the most likely token leads ``token``. For a token that is not listed this is a lower bound."""
    return a.top[0][1] - logprob_in(a, token)


def logprob_in(a: TokenLogprob, token: int) -> float:
    """Return the log-probability of ``token``. For a token that is neither chosen nor listed, return the log-probability of
    the last listed token, which is an upper bound."""
    if token == a.token_id and a.logprob is not None:
        return a.logprob
    return next((logprob for name, logprob in a.top if name == token), a.top[-1][1])

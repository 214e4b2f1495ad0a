"""Measure the cost of a grammar's masks by walking through random texts of it, before any request depends on it."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import numpy as np

from dovetail.constraints.gated import pack_tokens
from dovetail.constraints.mask_budget import Meter, MeteredMatcher
from dovetail.errors import GrammarError

if TYPE_CHECKING:
    from dovetail.constraints.mask_budget import MaskBudget
    from dovetail.interfaces.grammar import CompiledGrammar, GrammarContext, Matcher
    from dovetail.sampling_params import GrammarSpec

log = logging.getLogger(__name__)

WALKS = 2
"""Set the number of walks. The first walk prefers tokens of one byte, with which a text takes the most steps; the
second takes any token."""
STEPS = 96
"""Limit the number of tokens of a walk. A cost that grows with the text is found within this number. A cost that begins
to grow later is found while a request generates."""


class Probe:
    """Walk through random texts of a grammar. The random numbers are derived from the constraint, so its walks are
    always the same. Not thread-safe."""

    def __init__(self, context: GrammarContext, budget: MaskBudget) -> None:
        self._budget = budget
        self._row = np.zeros((1, -(-context.vocab_size // 32)), np.int32)
        self._ends = pack_tokens(
            context.vocab_size, (token for token in context.eos_token_ids if token < context.vocab_size)
        )
        tokens = enumerate(context.token_bytes[: context.vocab_size])
        self._bytes = pack_tokens(context.vocab_size, (token for token, data in tokens if data and len(data) == 1))

    def try_out(self, grammar: CompiledGrammar, spec: GrammarSpec, backend: str) -> None:
        """Raise ``GrammarError`` if masks exceed the budget or allow a token that is not accepted, or if the backend
        gives up.

        The time is bounded: the walks stop once they have taken four times ``MaskBudget.ahead``.
        """
        found: list[GrammarError] = []
        source = random.Random(spec.text)
        end = time.perf_counter() + 4 * self._budget.ahead
        for walk in range(WALKS):
            meter = Meter(spec, backend, self._budget, found.append)
            try:
                self._walk(MeteredMatcher(grammar.matcher(), meter), source, end, short=walk == 0)
            except GrammarError as error:
                if found:
                    raise
                text = f"grammar backend {backend} gives up on texts of this {spec.kind}: {error}"
                raise GrammarError(text, param=spec.kind, keyword=error.keyword or "size") from error
            except Exception:
                log.exception("grammar backend %s failed in a text of a %s", backend, spec.kind)
                return  # a request ends if its text reaches this failure; other texts may not reach it

    def _walk(self, matcher: Matcher, source: random.Random, end: float, *, short: bool) -> None:
        for _ in range(STEPS):
            if time.perf_counter() > end:
                return
            matcher.fill_bitmask(self._row, 0)
            token = self._token(source, short=short)
            if token is None:
                return
            if not matcher.accept(token):
                raise GrammarError(f"its mask allows token {token}, which it then refuses", keyword="masks")
            if matcher.is_terminated:
                return

    def _token(self, source: random.Random, *, short: bool) -> int | None:
        """Return a token that the mask allows and that does not end the text; None if there is none."""
        allowed = self._row[0] & ~self._ends
        words = allowed & self._bytes if short and (allowed & self._bytes).any() else allowed
        filled = np.flatnonzero(words)
        if not len(filled):
            return None
        word = int(filled[source.randrange(len(filled))])
        bits = int(words[word]) & 0xFFFFFFFF
        return 32 * word + source.choice([bit for bit in range(32) if bits >> bit & 1])

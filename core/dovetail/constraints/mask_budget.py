"""Limit the time that the matcher of a request may take: an average time per token, and a total time in excess of it.

All requests of a batch wait for the matchers. Few libraries limit the time of one step, and with some constraints each
token takes longer than the one before. A request whose matcher exceeds the budget ends with an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dovetail.errors import GrammarError
from dovetail.interfaces.grammar import Matcher

if TYPE_CHECKING:
    from dovetail.sampling_params import GrammarSpec
    from dovetail.types import IntArray

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class MaskBudget:
    """Describe the time that a matcher may take, in seconds: ``per_token`` on average, and up to ``ahead`` more than
    that in total."""

    per_token: float = 0.02
    ahead: float = 1.0


DEFAULT_MASK_BUDGET = MaskBudget()


class Meter:
    """Measure the time that the matcher of one request has taken, less the time that its tokens allow.

    ``alone`` is true if the masks of the request are filled in a call for this request only. The engine sets it after a
    slow call for several requests, to find out which request is the cause. ``over`` is called once, when the budget is
    exceeded.
    """

    def __init__(
        self, spec: GrammarSpec, backend: str, budget: MaskBudget, over: Callable[[GrammarError], None]
    ) -> None:
        self.alone = False
        self.error: GrammarError | None = None
        self._spec = spec
        self._backend = backend
        self._budget = budget
        self._over = over
        self._ahead = 0.0
        self._tokens = 0

    def allow_token(self) -> None:
        """Add the time that one more token allows."""
        self._tokens += 1
        self._ahead = max(self._ahead - self._budget.per_token, 0.0)

    def charge(self, seconds: float) -> None:
        """Add the time that the matcher has taken. Raises ``GrammarError`` if the budget is exceeded, and on every call
        after that."""
        self._ahead += seconds
        if self.error is None and self._ahead > self._budget.ahead:
            self.error = self._excess(seconds)
            self._over(self.error)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _excess(self, seconds: float) -> GrammarError:
        return GrammarError(
            f"the masks of this {self._spec.kind} take too long with grammar backend {self._backend}: "
            f"{1000 * seconds:.0f} ms for one, {self._tokens} tokens into the text; allowed: "
            f"{1000 * self._budget.per_token:g} ms a token (`grammar.mask_ms`) and {1000 * self._budget.ahead:g} ms "
            "beyond that (`grammar.mask_burst_ms`). Make it smaller or less ambiguous, or try another grammar_backend",
            param=self._spec.kind,
            keyword="size",
        )


class MeteredMatcher(Matcher):
    """Measure the time of each call of a matcher. Every call may raise the ``GrammarError`` of ``Meter.charge``.

    The caller of ``GrammarBackend.fill_bitmasks`` charges the time of the masks that ``inner`` fills.
    """

    def __init__(self, matcher: Matcher, meter: Meter) -> None:
        self._matcher = matcher
        self._meter = meter

    def _timed(self, call: Callable[[], _T]) -> _T:
        start = time.perf_counter()
        found = call()
        self._meter.charge(time.perf_counter() - start)
        return found

    @property
    def inner(self) -> Matcher | None:
        """See ``Matcher``."""
        return self._matcher.inner

    def fill_bitmask(self, bitmask: IntArray, row: int) -> None:
        """See ``Matcher``."""
        self._timed(lambda: self._matcher.fill_bitmask(bitmask, row))

    def accept(self, token_id: int) -> bool:
        """See ``Matcher``."""
        self._meter.allow_token()
        return self._timed(lambda: self._matcher.accept(token_id))

    def rollback(self, num_tokens: int) -> None:
        """See ``Matcher``."""
        self._timed(lambda: self._matcher.rollback(num_tokens))

    @property
    def is_terminated(self) -> bool:
        """See ``Matcher``."""
        return self._timed(lambda: self._matcher.is_terminated)

    def jump_forward(self) -> str:
        """See ``Matcher``."""
        return self._timed(self._matcher.jump_forward)

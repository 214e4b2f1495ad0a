"""How long the matcher of a request may take: so much for each token, and so much at once; beyond that the request ends.

Matchers run where every request waits for them, and few libraries bound a step: some constraints cost more with each token.
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
    """Seconds of a matcher: ``per_token`` on the average, ``ahead`` is how far it may be beyond that."""

    per_token: float = 0.02
    ahead: float = 1.0


DEFAULT_MASK_BUDGET = MaskBudget()


class Meter:
    """The time that the matcher of one request has taken, less what its tokens allow.

    ``alone`` is whether its masks are to be filled apart from others': so where a call for several was slow, and nobody
    knows whose fault it was. ``over`` is told once, when it has gone too far.
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
        """The text has grown by a token."""
        self._tokens += 1
        self._ahead = max(self._ahead - self._budget.per_token, 0.0)

    def charge(self, seconds: float) -> None:
        """So long has it taken. Raises ``GrammarError`` where that is too long, and always from then on."""
        self._ahead += seconds
        if self.error is None and self._ahead > self._budget.ahead:
            self.error = self._excess(seconds)
            self._over(self.error)
        if self.error is not None:
            raise self.error.with_traceback(None)

    def _excess(self, seconds: float) -> GrammarError:
        return GrammarError(
            f"the masks of this {self._spec.kind} take too long with grammar backend {self._backend}: {1000 * seconds:.0f} ms "
            f"for one, {self._tokens} tokens into the text; allowed: {1000 * self._budget.per_token:g} ms a token "
            f"(`grammar.mask_ms`) and {1000 * self._budget.ahead:g} ms beyond that (`grammar.mask_burst_ms`). Make it smaller "
            "or less ambiguous, or try another grammar_backend",
            param=self._spec.kind,
            keyword="size",
        )


class MeteredMatcher(Matcher):
    """A matcher whose time counts. Every call may raise the ``GrammarError`` of ``Meter.charge``.

    Masks that ``inner`` fills are charged by whoever has it fill them.
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

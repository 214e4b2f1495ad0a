"""Decide whether drafts pay. The decision is made separately for each range of the number of running requests; the
ranges end at powers of two.

Steps with drafts produce more tokens and take longer. Without drafts, the next step can be launched before the tokens
of the last one are read. Which of the two modes is faster depends on the load, the machine and the text, so the rates
of both are measured in tokens per second, over the last steps of each mode; later steps weigh more. The faster mode
runs. The slower mode is tried again after a pause, which doubles each time, up to ``LONGEST_PAUSE``, until that mode is
the faster one.

A drafter that must see every step cannot draft for a request any more after one step of that request ran without it.
While such a drafter pays, it is never interrupted to try steps without drafts again. Even their first measurement is
skipped while the drafter is sure to win. It is sure to win if its rate is at least ``MARGIN`` times the rate of steps
that would only run the target's forward pass and produce one token per row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 16
"""The number of steps after which a rate is known. A trial takes this number of steps."""
KEPT = 0.95
"""The factor by which the weight of earlier steps shrinks with each step, so that a rate is that of about the last
twenty steps. The rate is the sum of tokens divided by the sum of seconds, because accepted drafts come in bursts."""
OUTLIER = 4.0
"""A step that takes longer than this factor times the usual time counts as if it took exactly that long. Such steps
occur, for example, when a graph is captured or the garbage collector runs."""
UNSETTLED = 2
"""The number of steps after a change of mode that are not measured. The first of them does not overlap with another
step."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 8192
"""The number of steps until the slower mode is tried again: at first, and at most."""
MARGIN = 1.3
"""The advantage with which a drafter that must see every step is sure to win. It is the drafter's rate divided by the
rate of steps that only verify."""
ADVANTAGE = 1.03
"""The smallest ratio of the rates with and without drafts at which drafts are used. It is above 1, because some costs
of drafts arise outside the measured step, and because steps without drafts are steadier."""


@dataclass(slots=True)
class _Rate:
    """Measure a rate per second over the last steps."""

    seen: int = 0
    brought: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0

    def add(self, brought: float, seconds: float) -> None:
        if self.seen >= TRIAL:
            seconds = min(seconds, OUTLIER * self.seconds / self.weight)
        self.seen += 1
        self.brought = KEPT * self.brought + brought
        self.seconds = KEPT * self.seconds + seconds
        self.weight = KEPT * self.weight + 1

    @property
    def value(self) -> float:
        return self.brought / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Mode:
    """Hold the rate of one of the two modes, and the number of steps until the mode is tried again if it is the slower
    one."""

    tokens: _Rate = field(default_factory=_Rate)
    pause: int = FIRST_PAUSE

    @property
    def known(self) -> bool:
        return self.tokens.seen >= TRIAL

    @property
    def rate(self) -> float:
        return self.tokens.value


@dataclass(slots=True)
class _Load:
    """Hold what was measured for one range of the number of requests."""

    plain: _Mode = field(default_factory=_Mode)
    drafted: _Mode = field(default_factory=_Mode)
    verified: _Rate = field(default_factory=_Rate)  # rows per second of the target's forward passes with drafts
    since_trial: int = 0

    @property
    def pays(self) -> bool:
        return self.drafted.rate >= ADVANTAGE * self.plain.rate


class AdaptiveDrafting:
    """Decide before each step whether to draft, and record after it how long it took. Not thread-safe."""

    def __init__(self, *, always: bool, must_see_all: bool) -> None:
        """With ``always``, drafts are used whether they pay or not. ``must_see_all`` is ``Drafter.must_see_all``."""
        self._always, self._must_see_all = always, must_see_all
        self._loads: dict[int, _Load] = {}
        self._mode, self._in_mode = True, 0

    def should_draft(self, rows: int) -> bool:
        """Return True if the drafter should propose drafts in a step of ``rows`` requests."""
        if self._always:
            return True
        load = self._load(rows)
        if not load.drafted.known:
            return True
        if not load.plain.known:
            return self._must_see_all and self._is_sure(load)
        return load.pays

    def record(self, rows: int, drafted: bool, seconds: float, tokens: int, verify_seconds: float) -> None:
        """Record that a step of decode rows took ``seconds`` and produced ``tokens`` tokens. ``verify_seconds`` of this
        time were spent on the target's forward pass. The caller must not record steps with prompts."""
        if drafted is not self._mode:
            self._mode, self._in_mode = drafted, 0
        self._in_mode += 1
        if self._always or self._in_mode <= UNSETTLED or not tokens or seconds <= 0:
            return
        load = self._load(rows)
        mode = load.drafted if drafted else load.plain
        mode.tokens.add(tokens, seconds)
        if drafted:
            load.verified.add(rows, verify_seconds)
        if load.plain.known and load.drafted.known:
            self._plan_trial(load)

    def _plan_trial(self, load: _Load) -> None:
        """Forget the rate of the slower mode when its pause is over. ``should_draft`` then runs that mode until its
        rate is known again."""
        better, slower = (load.drafted, load.plain) if load.pays else (load.plain, load.drafted)
        better.pause = FIRST_PAUSE
        load.since_trial += 1
        if load.since_trial >= slower.pause and not (self._must_see_all and slower is load.plain):
            load.since_trial, slower.tokens, slower.pause = 0, _Rate(), min(2 * slower.pause, LONGEST_PAUSE)

    def _is_sure(self, load: _Load) -> bool:
        return load.drafted.rate >= MARGIN * load.verified.value > 0

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(max(rows - 1, 0).bit_length(), _Load())

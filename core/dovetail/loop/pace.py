"""Whether drafts pay: measured, for each number of running requests.

Steps with drafts bring more tokens and take longer; without them the next step is launched before the last is read. Which is
faster depends on the load, the machine and the text, so both are timed in turns: the rate of each is the median of its last
steps, the better one runs, and the other is tried again after a while, the later the oftener it has lost.

A drafter that must see every step cannot draft on for a request once steps have gone unseen. It is not interrupted for a
comparison that it is sure to win: where its rate is ``MARGIN`` times what steps would bring that do no more than verify.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

WINDOW = 12
"""Steps that a rate is the median of, and that a trial takes at least."""
UNSETTLED = 2
"""Steps after a change of mode that say nothing: the first is not overlapped with anything."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 8192
"""Steps until the slower way is tried again."""
MARGIN = 1.3
ADVANTAGE = 1.03
"""Drafts that gain less than this are left: what they cost beside the step is not all measured, and the other way is steadier."""


@dataclass(slots=True)
class _Arm:
    """One of the two ways: tokens per second of its last steps."""

    rates: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    seen: int = 0
    pause: int = FIRST_PAUSE

    @property
    def known(self) -> bool:
        return self.seen >= WINDOW

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)


@dataclass(slots=True)
class _Load:
    """What is known of one number of requests. ``trial`` counts down the steps of a trial of the slower way."""

    plain: _Arm = field(default_factory=_Arm)
    drafted: _Arm = field(default_factory=_Arm)
    bound: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    since_trial: int = 0
    trial: int = 0

    @property
    def pays(self) -> bool:
        return self.drafted.rate >= ADVANTAGE * self.plain.rate


class Pace:
    """Decides before each step, and is told afterwards what it took. Not thread-safe."""

    def __init__(self, *, always: bool, must_see_all: bool) -> None:
        """``always``: drafts whether they pay or not. ``must_see_all``: see ``Drafter.must_see_all``."""
        self._always, self._must_see_all = always, must_see_all
        self._loads: dict[int, _Load] = {}
        self._mode, self._in_mode = True, 0

    def drafts(self, rows: int) -> bool:
        """Whether the drafter is asked in a step of so many requests."""
        if self._always:
            return True
        load = self._load(rows)
        if not load.drafted.known:
            return True
        if not load.plain.known:
            return self._must_see_all and self._is_sure(load)
        return load.pays != (load.trial > 0)

    def note(self, rows: int, drafted: bool, seconds: float, tokens: int, verify_seconds: float) -> None:
        """A step of decode rows alone took ``seconds`` and brought ``tokens``; ``verify_seconds`` of it went into the target's
        forward pass. Steps with prompts are not told."""
        if drafted is not self._mode:
            self._mode, self._in_mode = drafted, 0
        self._in_mode += 1
        if self._always or self._in_mode <= UNSETTLED or not tokens or seconds <= 0:
            return
        load = self._load(rows)
        arm = load.drafted if drafted else load.plain
        arm.rates.append(tokens / seconds)
        arm.seen += 1
        if drafted and verify_seconds > 0:
            load.bound.append(rows / verify_seconds)
        if load.plain.known and load.drafted.known:
            self._plan_trials(load)

    def _plan_trials(self, load: _Load) -> None:
        slower = load.plain if load.pays else load.drafted
        if load.trial:
            load.trial -= 1
            if not load.trial:
                slower.pause = min(2 * slower.pause, LONGEST_PAUSE)
            return
        load.since_trial += 1
        if load.since_trial >= slower.pause and not (self._must_see_all and slower is load.plain):
            load.since_trial, load.trial = 0, WINDOW + UNSETTLED

    def _is_sure(self, load: _Load) -> bool:
        return bool(load.bound) and load.drafted.rate >= MARGIN * statistics.median(load.bound)

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(max(rows - 1, 0).bit_length(), _Load())

"""Whether drafts pay: measured, for each number of running requests.

Steps with drafts bring more tokens and take longer; without them the next step is launched before the last is read. Which is
faster depends on the load, the machine and the text, so both are timed in turns: the rate of each is that of its last steps,
later ones weighing more. The better one runs, and the other is tried again after a while, the later the oftener it has lost.

A drafter that must see every step cannot draft on for a request once steps have gone unseen. It is not interrupted for a
comparison that it is sure to win: where its rate is ``MARGIN`` times what steps would bring that do no more than verify.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TRIAL = 16
"""Steps that a rate is known after: so long is a way tried."""
KEPT = 0.95
"""Weight of what was measured, beside the next step: a rate is that of some twenty steps. Accepted drafts come in bursts, so that
it is of tokens in all over seconds in all."""
OUTLIER = 4.0
"""A step that takes so many times the usual (a graph is captured, the collector runs) counts as this."""
UNSETTLED = 2
"""Steps after a change of mode that say nothing: the first is not overlapped with anything."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 8192
"""Steps until the slower way is tried again."""
MARGIN = 1.3
ADVANTAGE = 1.03
"""Drafts that gain less than this are left: what they cost beside the step is not all measured, and the other way is steadier."""


@dataclass(slots=True)
class _Rate:
    """Of something per second, over the last steps."""

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
class _Arm:
    """One of the two ways: tokens per second, and the steps until it is tried again where it is the slower one."""

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
    """What is known of one number of requests."""

    plain: _Arm = field(default_factory=_Arm)
    drafted: _Arm = field(default_factory=_Arm)
    verified: _Rate = field(default_factory=_Rate)  # rows per second of what steps with drafts spend on verifying
    since_trial: int = 0

    @property
    def pays(self) -> bool:
        return self.drafted.rate >= ADVANTAGE * self.plain.rate


class AdaptiveDrafting:
    """Decides before each step, and is told afterwards what it took. Not thread-safe."""

    def __init__(self, *, always: bool, must_see_all: bool) -> None:
        """``always``: drafts whether they pay or not. ``must_see_all``: see ``Drafter.must_see_all``."""
        self._always, self._must_see_all = always, must_see_all
        self._loads: dict[int, _Load] = {}
        self._mode, self._in_mode = True, 0

    def should_draft(self, rows: int) -> bool:
        """Whether the drafter is asked in a step of so many requests."""
        if self._always:
            return True
        load = self._load(rows)
        if not load.drafted.known:
            return True
        if not load.plain.known:
            return self._must_see_all and self._is_sure(load)
        return load.pays

    def record(self, rows: int, drafted: bool, seconds: float, tokens: int, verify_seconds: float) -> None:
        """A step of decode rows alone took ``seconds`` and brought ``tokens``; ``verify_seconds`` of it went into the target's
        forward pass. Steps with prompts are not told."""
        if drafted is not self._mode:
            self._mode, self._in_mode = drafted, 0
        self._in_mode += 1
        if self._always or self._in_mode <= UNSETTLED or not tokens or seconds <= 0:
            return
        load = self._load(rows)
        arm = load.drafted if drafted else load.plain
        arm.tokens.add(tokens, seconds)
        if drafted:
            load.verified.add(rows, verify_seconds)
        if load.plain.known and load.drafted.known:
            self._plan_trial(load)

    def _plan_trial(self, load: _Load) -> None:
        """Forget the rate of the slower way when it is time: what is not known is run."""
        better, slower = (load.drafted, load.plain) if load.pays else (load.plain, load.drafted)
        better.pause = FIRST_PAUSE
        load.since_trial += 1
        if load.since_trial >= slower.pause and not (self._must_see_all and slower is load.plain):
            load.since_trial, slower.tokens, slower.pause = 0, _Rate(), min(2 * slower.pause, LONGEST_PAUSE)

    def _is_sure(self, load: _Load) -> bool:
        return load.drafted.rate >= MARGIN * load.verified.value > 0

    def _load(self, rows: int) -> _Load:
        return self._loads.setdefault(max(rows - 1, 0).bit_length(), _Load())

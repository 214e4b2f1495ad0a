"""A plugin that is wrong in one way, and the case of its suite that must say so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.testing.component import ComponentSuite

Suite = Callable[[], ComponentSuite]


@dataclass(frozen=True)
class Mutant:
    """``broken`` is a suite of a component that is as ``sound``, but for its ``fault``: a phrase, "forgets the soft cap".

    ``case`` is the method that must fail for it, with the arguments of at least one of ``runs``, and pass for ``sound`` with all.
    ``says`` is a part of what it says then. Other cases may fail as well.
    """

    fault: str
    case: str
    broken: Suite
    sound: Suite
    runs: Sequence[tuple[Any, ...]] = ((),)
    says: str = ""

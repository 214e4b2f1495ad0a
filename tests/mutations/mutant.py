"""Describe a plugin that is wrong in one way, and the case of its suite that must report it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dovetail.testing.component import ComponentSuite

Suite = Callable[[], ComponentSuite]


@dataclass(frozen=True)
class Mutant:
    """Describe a broken component. ``broken`` is a suite of a component that equals ``sound`` except for its
    ``fault``, a phrase such as "ignores the soft cap". ``case`` is the method that must fail for it, with the
    arguments of at least one of ``runs``, and pass for ``sound`` with all. ``says`` is a part of the message of that
    failure. Other cases may fail as well."""

    fault: str
    case: str
    broken: Suite
    sound: Suite
    runs: Sequence[tuple[Any, ...]] = ((),)
    says: str = ""

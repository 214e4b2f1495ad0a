"""Choose how ranks divide layers of experts, and record why."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from dovetail.registry.candidates import tuned_names
from dovetail.registry.measured import EXPERT_DIVISION
from dovetail.registry.ranks import expert_division

if TYPE_CHECKING:
    from dovetail.config import Config
    from dovetail.interfaces.model import ModelInfo
    from dovetail.registry.resolution import Resolution
    from dovetail.registry.tuning import Tuned


def divide_experts(config: Config, info: ModelInfo, tuned: Tuned) -> Literal["tp", "ep"]:
    """Return how the ranks of ``config`` divide the experts of the model ``info``: as ``parallel.experts`` says, and with
    ``auto`` as was measured to be fastest. Raises ``ConfigError`` if the ranks cannot divide them so."""
    measured = tuned_names(tuned.slots, EXPERT_DIVISION)
    return expert_division(config.parallel.experts, info, config.parallel.tp, measured)


def note_division(config: Config, division: str, tuned: Tuned, experts: Resolution) -> Resolution:
    """Return how the slot ``experts`` was filled, with the measurement that ``auto`` followed, and with the records of
    divisions that do not apply."""
    if config.parallel.experts != "auto" or config.parallel.tp == 1 or not experts.concerned:
        return experts
    why = tuned.why(EXPERT_DIVISION, division)
    notes = [experts.note, f"{EXPERT_DIVISION} is {division}, {why}" if why else ""]
    unused = (*experts.unused, *tuned.passed_over(EXPERT_DIVISION))
    return replace(experts, note="; ".join(filter(None, notes)), unused=unused)

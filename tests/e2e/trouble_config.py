"""Config section of the attention backend ``trouble``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class TroubleConfig(PluginConfig):
    """Nothing to set: requests ask for trouble, and so does the environment."""

    kind: Literal["trouble"] = "trouble"

"""Define the config section of the attention backend ``trouble``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class TroubleConfig(PluginConfig):
    """Have no fields: requests and the environment select the failures."""

    kind: Literal["trouble"] = "trouble"

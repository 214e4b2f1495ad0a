"""Define the config section of the attention backend ``planted``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class PlantedConfig(PluginConfig):
    """Select a ``fault``: decode rows that do not see their oldest key, or prompts in which tokens see one key too
    far. ``sleep_ms`` is added to each step."""

    kind: Literal["planted"] = "planted"
    fault: Literal["none", "oldest", "ahead"] = "none"
    sleep_ms: float = 0.0

"""Define the config section of the attention backend ``planted``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class PlantedConfig(PluginConfig):
    """Select a ``fault``: decode rows that do not see their oldest key, prompts in which tokens see one key too
    far, a backend that cannot be built, or one that raises in steps with more than 4 rows. ``sleep_ms`` is added to
    each step."""

    kind: Literal["planted"] = "planted"
    fault: Literal["none", "oldest", "ahead", "no_engine", "many_rows"] = "none"
    sleep_ms: float = 0.0

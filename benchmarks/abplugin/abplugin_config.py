"""Define the config sections of ``abplugin_entry``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class SlowedConfig(PluginConfig):
    """Configure the added time, which is ``share`` of each step's time."""

    kind: Literal["slowed"] = "slowed"
    share: float = 0.1


class InterpretedConfig(PluginConfig):
    """Have no settings."""

    kind: Literal["triton_interpreted"] = "triton_interpreted"

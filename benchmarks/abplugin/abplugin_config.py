"""Config sections of ``abplugin_entry``."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class SlowedConfig(PluginConfig):
    """``share`` of each step's time is added to it."""

    kind: Literal["slowed"] = "slowed"
    share: float = 0.1


class InterpretedConfig(PluginConfig):
    """Nothing to set."""

    kind: Literal["triton_interpreted"] = "triton_interpreted"

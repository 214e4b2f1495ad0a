"""Define config sections of broken plugins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import ConfigDict, Field, PrivateAttr

from dovetail.config.plugin import PluginConfig


class HeavyConfig(PluginConfig):
    """Have no fault."""

    kind: Literal["heavy"] = "heavy"


class TwiceConfig(PluginConfig):
    """Have no fault."""

    kind: Literal["twice"] = "twice"


class ForgetfulConfig(PluginConfig):
    """Do not serialize a field that was set."""

    kind: Literal["twice"] = "twice"
    patience: int = Field(default=1, exclude=True)


class LaxConfig(PluginConfig):
    """Accept any key."""

    model_config = ConfigDict(extra="ignore")
    kind: Literal["twice"] = "twice"


class BoundConfig(PluginConfig):
    """Hold a value that no other process can have."""

    kind: Literal["twice"] = "twice"
    _rank: Callable[[int], int] = PrivateAttr(default=lambda age: -age)

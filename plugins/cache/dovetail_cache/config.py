"""Config sections of the prefix caches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class NoneConfig(PluginConfig):
    """Keep no prefixes."""

    kind: Literal["none"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]


class RadixConfig(PluginConfig):
    """Keep prefixes in a radix tree."""

    kind: Literal["radix"] = "radix"  # pyright: ignore[reportIncompatibleVariableOverride]
    eviction: Literal["lru", "lfu", "priority"] = Field(
        default="lru",
        description="What is forgotten first: the least recently used, the least often used, or the lowest request priority. Ties go to the least recently used.",
    )

"""Define the config sections of the prefix caches."""

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
        description="Which prefixes are evicted first: the least recently used, the least often used, or those of the "
        "lowest request priority. Of equals, the least recently used.",
    )

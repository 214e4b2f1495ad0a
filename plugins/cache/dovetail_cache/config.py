"""Define the config sections of the prefix caches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class NoneConfig(PluginConfig):
    """Keep no prefixes."""

    kind: Literal["none"] = "none"  # pyright: ignore[reportIncompatibleVariableOverride]


class PagedConfig(PluginConfig):
    """Keep keys and values as they are, converted to `memory.kv_dtype`."""

    kind: Literal["paged"] = "paged"  # pyright: ignore[reportIncompatibleVariableOverride]


class ScaledConfig(PluginConfig):
    """Keep keys and values in `fp8_e4m3` with scales."""

    kind: Literal["scaled"] = "scaled"  # pyright: ignore[reportIncompatibleVariableOverride]
    scales: Literal["auto", "checkpoint", "token_head"] = Field(
        default="auto",
        description="`checkpoint`: a scale for each layer, or for each of its heads, from the checkpoint's k_scale and v_scale. "
        "`token_head`: a scale of 16 bits for each token and head, computed when the token is stored. `auto`: those of the "
        "checkpoint if its config.json declares some, otherwise `token_head`. Scales of latents (MLA) are computed with each setting, "
        "because no checkpoint has some.",
    )


class RadixConfig(PluginConfig):
    """Keep prefixes in a radix tree."""

    kind: Literal["radix"] = "radix"  # pyright: ignore[reportIncompatibleVariableOverride]
    eviction: Literal["lru", "lfu", "priority"] = Field(
        default="lru",
        description="Which prefixes are evicted first: the least recently used, the least often used, or those of the "
        "lowest request priority. Of equals, the least recently used.",
    )

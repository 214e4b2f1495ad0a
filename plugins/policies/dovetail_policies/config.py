"""Define the config sections of the schedule policies."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class FcfsConfig(PluginConfig):
    """Admit requests in the order of their arrival (first come, first served)."""

    kind: Literal["fcfs"] = "fcfs"  # pyright: ignore[reportIncompatibleVariableOverride]


class LpmConfig(PluginConfig):
    """Admit requests with the longest cached prefix first."""

    kind: Literal["lpm"] = "lpm"  # pyright: ignore[reportIncompatibleVariableOverride]
    window: int = Field(default=64, ge=1, description="Only this many requests, the oldest, are reordered.")
    max_wait_seconds: float = Field(
        default=10.0, ge=0, description="Requests that have waited this long go first, the oldest before the others."
    )


class DfsWeightConfig(PluginConfig):
    """Admit requests that share a prefix one after another, the largest groups first."""

    kind: Literal["dfs_weight"] = "dfs_weight"  # pyright: ignore[reportIncompatibleVariableOverride]
    window: int = Field(default=64, ge=1, description="Only this many requests, the oldest, are reordered.")
    max_wait_seconds: float = Field(
        default=10.0, ge=0, description="Requests that have waited this long go first, the oldest before the others."
    )
    depth: int = Field(default=4096, ge=1, description="Prompts are compared up to this many tokens.")
    granularity: int = Field(
        default=16,
        ge=1,
        description="Lengths of shared prefixes are rounded down to multiples of this; the page size is a good value.",
    )


class PriorityConfig(PluginConfig):
    """Admit requests with the highest priority first."""

    kind: Literal["priority"] = "priority"  # pyright: ignore[reportIncompatibleVariableOverride]
    ageing_seconds: float | None = Field(
        default=30.0,
        gt=0,
        description="Waiting for this many seconds counts as one level of priority, so that no request starves. `null`: "
        "priority is strict, and low priorities may starve.",
    )

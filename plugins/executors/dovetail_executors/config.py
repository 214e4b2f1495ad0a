"""Define the config sections of the executors."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class LocalConfig(PluginConfig):
    """Run the one rank in the engine's own process."""

    kind: Literal["local"] = "local"  # pyright: ignore[reportIncompatibleVariableOverride]


class WorkersConfig(PluginConfig):
    """Run each rank in a process of its own on this host."""

    kind: Literal["workers"] = "workers"  # pyright: ignore[reportIncompatibleVariableOverride]
    start_seconds: float = Field(
        default=900.0, gt=0, description="Seconds in which all ranks must have loaded the model and be ready."
    )
    step_seconds: float = Field(
        default=300.0,
        gt=0,
        description="Seconds in which all ranks must answer while a step runs, compilation of kernels included. After that the ranks are ended, and the engine with them. A rank that dies is noticed at once.",
    )
    spin_ms: float | None = Field(
        default=None,
        ge=0,
        description="Milliseconds for which a process that waits for another one checks for an answer without pause, before it sleeps until it is woken. By default 10 if there are two CPU cores for each process, else 0.05.",
    )

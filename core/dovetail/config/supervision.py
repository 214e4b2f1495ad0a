"""Define the config section of the supervision of engines."""

from __future__ import annotations

from pydantic import Field, model_validator

from dovetail.config.plugin import Section


class SupervisionSection(Section):
    """Configure what the server does with an engine that ends by itself or stands still: docs/reliability.md."""

    max_restarts: int = Field(
        default=3,
        ge=0,
        le=1000,
        description="How often an engine that has ended is started again within `window_seconds`; beyond it the server ends with status 70. 0: never, for those who let an orchestrator restart the server.",
    )
    window_seconds: float = Field(default=600.0, gt=0, description="Restarts that are older do not count.")
    backoff_seconds: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="Seconds before the first restart. The pause doubles with each further restart in the window, up to 60 s.",
    )
    stall_seconds: float = Field(
        default=60.0,
        gt=0,
        description="An engine that has neither sent nor answered anything for this number of seconds stands still: /health and new requests are answered with 503, and the stacks of its threads are logged. One step counts as silence.",
    )
    kill_seconds: float | None = Field(
        default=300.0,
        gt=0,
        description="After this number of seconds of silence the engine is killed, its requests end with an error, and it is started again. It must exceed the longest step, the compilation of kernels included. null: never.",
    )

    @model_validator(mode="after")
    def _stalls_first(self) -> SupervisionSection:
        if self.kill_seconds is not None and self.kill_seconds < self.stall_seconds:
            raise ValueError(
                f"kill_seconds is {self.kill_seconds:g}, less than stall_seconds ({self.stall_seconds:g}); give at least as much"
            )
        return self

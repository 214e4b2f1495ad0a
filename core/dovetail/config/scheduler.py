"""Define the config section of the scheduler."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import Section


class SchedulerSection(Section):
    """Configure how requests share steps."""

    max_running: int | None = Field(
        default=None,
        ge=1,
        le=8192,
        description="Requests that decode at the same time. By default 512 on CUDA, else 256.",
    )
    max_waiting: int = Field(
        default=8192, ge=1, description="Number of requests that may wait; one more is answered with 503."
    )
    chunk_size: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens that enter one step; longer prompts are chunked. By default 8192 on CUDA, else 2048.",
    )
    tenants_step_ms: float = Field(
        default=10.0,
        ge=0,
        description="While several tenants send requests, steps have as many prompt tokens as take about this time (milliseconds), between a thirty-second (at least 64) and a quarter of `chunk_size`, and up to twice as many for tenants with few requests: requests of other tenants begin sooner, and long prompts take longer. 0: steps have `chunk_size` tokens then too.",
    )
    mixed: bool = Field(default=True, description="Let steps with prompt chunks have decode rows too.")
    overlap: Literal["auto"] | bool = Field(
        default="auto",
        description="Launch step N+1 before the tokens of step N are read; steps with drafts are launched once these tokens are known. `auto`: on CUDA.",
    )
    draft: Literal["adaptive", "always"] = Field(
        default="adaptive",
        description="When the drafter proposes tokens. `adaptive`: while steps with drafts produce more tokens in the same time than steps without, as measured at each number of running requests, and with fewer draft tokens where few are accepted. `always`: in every step.",
    )
    min_draft_probability: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="A draft token is not verified if the drafter gives it, together with the draft tokens before it, a lower probability than this. Needs a drafter that states probabilities (`draft.probs`): `eagle`, `eagle3_tree`. 0: all are verified.",
    )
    wait_for_prefix: bool = Field(
        default=True,
        description="Let a request whose prefix another request is computing wait for it, instead of computing it again.",
    )
    shared_prefixes: bool = Field(
        default=True,
        description="Group decode rows by the prefixes that they share, which attention then reads once if that is faster: in layers that attend to all earlier tokens and, with backends that offer `attention.shared_window`, in layers with windows of 1,024 tokens and more. Has no effect with `batch_invariant`.",
    )
    pin_seconds: float = Field(
        default=60.0,
        ge=0,
        le=86400,
        description="Seconds for which the prefix of a group or session stays in the cache without a request for it. It is released sooner if the memory is needed.",
    )
    pin_fraction: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of the pool that groups and sessions may keep; beyond it the oldest are released. 0: none. Has no effect with a prefix cache that keeps nothing.",
    )

    @property
    def rows(self) -> int:
        """Return ``max_running`` of a resolved config."""
        assert self.max_running is not None, "resolve() fills it in"
        return self.max_running

    @property
    def chunk(self) -> int:
        """Return ``chunk_size`` of a resolved config."""
        assert self.chunk_size is not None, "resolve() fills it in"
        return self.chunk_size

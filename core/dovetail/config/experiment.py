"""Define the config of an online experiment: arms that one server runs side by side."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from dovetail.config.plugin import Section

BASE_ARM = "base"
"""The name of the config without the settings of any arm."""


class ShadowSection(Section):
    """Let a second arm answer a share of the requests as well, for comparison. Clients do not wait for it."""

    arm: str = Field(description="The second arm, whose answers are only compared.")
    primary: str = Field(default=BASE_ARM, description="The arm whose answers are sent to the clients.")
    percent: float = Field(gt=0, le=100, description="Share of the requests, chosen by a hash of their ids.")
    tokens_per_minute: int = Field(
        ge=1,
        description="Prompt and output tokens that the second arm may compute per minute. Requests beyond this are not compared.",
    )
    queue: int = Field(
        default=64,
        ge=1,
        description="Number of requests that may wait for the second arm. Further requests are not compared.",
    )
    keep: int = Field(
        default=256, ge=1, description="Number of comparisons that are kept; the oldest are dropped first."
    )
    keep_texts: bool = Field(
        default=False,
        description="Keep the texts of both outputs in memory. By default only hashes, lengths and the first divergence are kept.",
    )


class ExperimentSection(Section):
    """Describe arms, each a variant of this config, that one server runs side by side. Only `dovetail serve` reads
    this section; docs/experiments.md explains it."""

    arms: dict[str, dict[str, Any]] = Field(
        default_factory=dict,
        description="By name, the settings that differ from the rest of this config. `base` is the config itself and need not be listed. Without arms there is no experiment.",
    )
    split: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] | None = Field(
        default=None, description="Weight of each arm: its share of the keys."
    )
    key: str = Field(
        default="user",
        description="Requests with the same key are served by the same arm. The key is `user` (the request's field), `header:NAME`, or `address` (the client's address, which is also used if the others are missing).",
    )
    shadow: ShadowSection | None = Field(
        default=None,
        description="Instead of `split`: a mapping of `primary`, `arm`, `percent`, `tokens_per_minute`, `queue`, `keep`, `keep_texts`.",
    )

    @field_validator("key")
    @classmethod
    def _known_key(cls, key: str) -> str:
        if key in ("user", "address") or re.fullmatch(r"header:[!-9;-~]+", key):
            return key
        raise ValueError("allowed: 'user', 'address', or 'header:' and the name of a header")

    @field_validator("arms")
    @classmethod
    def _named(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        for name, settings in arms.items():
            if not re.fullmatch(r"[a-z0-9][a-z0-9_-]{0,39}", name):
                raise ValueError(
                    f"arms has {name!r}; allowed: names of lower-case letters, digits, '-' and '_', at most 40"
                )
            if name == BASE_ARM and settings:
                raise ValueError(f"arms.{BASE_ARM} is the config itself and has no settings; choose another name")
        return arms

    @model_validator(mode="after")
    def _consistent(self) -> ExperimentSection:
        if not self.arms and (self.split is not None or self.shadow is not None):
            raise ValueError("split and shadow need arms; give experiment.arms")
        if self.arms and (self.split is None) == (self.shadow is None):
            raise ValueError(
                "arms need one of split and shadow; " + ("give one" if self.split is None else "remove one")
            )
        known = ", ".join(dict.fromkeys([BASE_ARM, *self.arms]))
        for where, name in self._uses():
            if name != BASE_ARM and name not in self.arms:
                raise ValueError(f"{where} names {name!r}; allowed: the arms, {known}")
        for name in self.arms:
            if name not in self.names:
                raise ValueError(f"arms.{name} gets no request; give it a weight in split (0 is one), or remove it")
        if self.arms and len(self.names) < 2:
            raise ValueError("an experiment needs two different arms or more")
        if self.split is not None and not any(self.split.values()):
            raise ValueError("split has no weight above 0; give one")
        return self

    def _uses(self) -> list[tuple[str, str]]:
        if self.shadow is not None:
            return [("shadow.primary", self.shadow.primary), ("shadow.arm", self.shadow.arm)]
        return [("split", name) for name in self.split or ()]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the arms that run. The first one is the control, with which the others are compared."""
        return tuple(dict.fromkeys(name for _, name in self._uses()))

    @property
    def weights(self) -> dict[str, float]:
        """Return the weight of each arm that runs."""
        if self.shadow is not None:
            return {self.shadow.primary: 1.0, self.shadow.arm: 0.0}
        return dict(self.split or {})

"""Define the section of the config for adapters (LoRA)."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, model_validator

from dovetail.config.plugin import Section

MOST_SLOTS = 1024
AdaptedKind = Literal["linear", "experts", "embedding", "head"]
"""Name the kinds of modules that may have adapters."""
ADAPTER_NAME = re.compile(r"[^\s\x00-\x1f\x7f@][^\x00-\x1f\x7f@]{0,255}")
"""The names of adapters. ``@`` is left out because it separates names from versions in namespaces of cached prefixes."""


class AdaptersSection(Section):
    """Configure adapters (LoRA), which requests select by name. docs/adapters.md explains them."""

    enabled: bool = Field(
        default=False, description="Serve adapters. Memory for `max_resident` of them is allocated at the start."
    )
    load: dict[str, str] = Field(
        default_factory=dict,
        description="Adapters that are known from the start: directories saved by PEFT, by the names that requests give. Their headers are checked at the start; a request brings them to the device.",
    )
    modules: list[AdaptedKind] | None = Field(
        default=None,
        min_length=1,
        description="What may have adapters, and has memory in each slot: `linear` layers, `experts`, the `embedding` of tokens, the `head`. By default linear layers, and what the adapters in `load` have matrices of.",
    )
    max_resident: int = Field(
        default=8,
        ge=1,
        le=MOST_SLOTS,
        description="Adapters on the device at the same time. Any number may be known; the one that was used least recently gives way.",
    )
    max_rank: int | None = Field(
        default=None,
        ge=1,
        le=256,
        description="The largest rank of an adapter, which determines the memory of each. By default the largest in `load`, at least 16.",
    )
    max_host: int = Field(
        default=32,
        ge=1,
        description="The largest number of adapters that are kept in host memory, ready to be copied to the device. Others are read from their files again.",
    )
    host_gib: float | None = Field(
        default=None,
        gt=0,
        le=1 << 20,
        description="Host memory for the adapters that are kept there, in GiB, of all ranks together. As many are kept as fit, up to `max_host`. By default a quarter of the memory of the machine or container, and always one adapter.",
    )

    @model_validator(mode="after")
    def _names_are_usable(self) -> AdaptersSection:
        wrong = next((name for name in self.load if not ADAPTER_NAME.fullmatch(name)), None)
        if wrong is not None:
            raise ValueError(
                f"load has the name {wrong!r:.80}; allowed: up to 256 characters, without @ and control characters"
            )
        if self.load and not self.enabled:
            raise ValueError("load names adapters, and enabled is false; set adapters.enabled: true")
        return self

"""Define the settings of each rewriter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class NormalizeConfig(PluginConfig):
    """Select ``normalize``."""

    kind: Literal["normalize"] = "normalize"
    form: Literal["NFC", "NFKC"] = Field(default="NFC", description="The Unicode normal form.")


class RedactConfig(PluginConfig):
    """Select ``redact``."""

    kind: Literal["redact"] = "redact"
    patterns: tuple[str, ...] = Field(
        default=(r"[\w.+-]+@[\w-]+(\.[\w-]+)+",),
        description="Regular expressions. Text that matches one of them is replaced.",
    )
    mask: str = Field(default="[redacted]", description="The text that replaces a match.")

"""Config sections of the grammar backends."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class XGrammarConfig(PluginConfig):
    """JSON schemas, regexes and EBNF by XGrammar. What it cannot honour whole is refused."""

    kind: Literal["xgrammar"] = "xgrammar"  # pyright: ignore[reportIncompatibleVariableOverride]
    threads: int = Field(default=4, ge=1, le=256, description="Threads of one compilation.")
    strict: bool = Field(
        default=False,
        description="Objects that name their properties, and arrays that name their items, allow no others, even where "
        "the schema is open. By default a schema means what JSON Schema says it means.",
    )
    max_whitespace: int | None = Field(
        default=20,
        ge=1,
        description="Most whitespace characters in a row between the parts of a JSON text, so that no output runs on in "
        "spaces for ever; `null`: any number.",
    )

"""Define the config sections of the grammar backends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig

Strict = Annotated[
    bool,
    Field(
        description="Objects that list their properties, and arrays that list their items, allow no others, even if the schema "
        "leaves them open. By default schemas are interpreted as JSON Schema defines."
    ),
]
MaxWhitespace = Annotated[
    int | None,
    Field(
        ge=1,
        description="Maximum number of consecutive whitespace characters between the parts of a JSON text, so that no output "
        "continues with spaces for ever; `null`: unlimited.",
    ),
]


class XGrammarConfig(PluginConfig):
    """Configure XGrammar, which compiles JSON schemas, regexes, EBNF, choices and structural tags. It refuses
    constraints that it cannot enforce completely."""

    kind: Literal["xgrammar"] = "xgrammar"  # pyright: ignore[reportIncompatibleVariableOverride]
    threads: int = Field(
        default=8, ge=1, le=256, description="Threads that compile one grammar, and that fill the masks of a batch."
    )
    strict: Strict = False
    max_whitespace: MaxWhitespace = 20


class LLGuidanceConfig(PluginConfig):
    """Configure llguidance, which compiles JSON schemas, regexes, GBNF, Lark, choices and structural tags. It refuses
    constraints that it cannot enforce completely."""

    kind: Literal["llguidance"] = "llguidance"  # pyright: ignore[reportIncompatibleVariableOverride]
    threads: int = Field(default=4, ge=1, le=256, description="Threads that fill the masks of a batch.")
    max_whitespace: MaxWhitespace = 20
    max_items: int = Field(
        default=50_000,
        ge=1000,
        description="Maximum number of parser items of one step: about 20,000 take a millisecond. A request whose text needs "
        "more ends with an error.",
    )
    max_lexer_steps: int = Field(
        default=200_000,
        ge=1000,
        description="Maximum number of lexer steps in one decode step: about 14,000 take a millisecond.",
    )
    max_lexer_states: int = Field(
        default=100_000, ge=1000, description="Maximum number of lexer states of one request: 1 to 2 KB each."
    )


class OutlinesConfig(PluginConfig):
    """Configure outlines-core, which compiles JSON schemas, regexes and choices as one regex. It refuses constraints
    that it cannot enforce completely."""

    kind: Literal["outlines"] = "outlines"  # pyright: ignore[reportIncompatibleVariableOverride]
    strict: Strict = False
    open_depth: int = Field(
        default=1,
        ge=0,
        le=4,
        description="Maximum depth of arrays and objects in a value that the schema leaves open, because a regex cannot nest "
        "without a limit. Each level doubles the size of the index.",
    )
    max_whitespace: MaxWhitespace = 8
    max_size: int = Field(
        default=50_000,
        ge=1,
        description="Maximum number of characters of the regex with its repetitions written out. A larger regex is refused "
        "before it is compiled.",
    )
    max_states: int = Field(
        default=10_000,
        ge=1,
        description="Maximum number of states of the automaton of a regex. A regex that needs more is refused.",
    )
    max_transitions: int = Field(
        default=20_000_000,
        ge=1,
        description="Maximum number of allowed tokens, summed over all states: the size of the index, at 18 bytes each. A regex "
        "that needs more is refused.",
    )


class LMFormatEnforcerConfig(PluginConfig):
    """Configure lm-format-enforcer, which compiles JSON schemas, regexes and choices in Python. It refuses constraints
    that it cannot enforce completely."""

    kind: Literal["lm_format_enforcer"] = "lm_format_enforcer"  # pyright: ignore[reportIncompatibleVariableOverride]
    strict: Strict = False
    max_whitespace: MaxWhitespace = 20
    max_size: int = Field(
        default=50_000,
        ge=1,
        description="Maximum number of characters of a regex with its repetitions written out, and of parts of a schema written as "
        "a pattern. Larger constraints are refused.",
    )
    max_work: int = Field(
        default=500_000,
        ge=1000,
        description="Maximum number of grammar positions that are examined for one mask or one token: about a microsecond each. A "
        "request whose text needs more ends with an error.",
    )
    cache_bytes: int = Field(
        default=4 * 2**20,
        ge=0,
        description="Maximum memory for the cached masks of one grammar, in bytes. Other masks are computed again when they are "
        "needed.",
    )

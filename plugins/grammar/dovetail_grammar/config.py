"""Config sections of the grammar backends."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig

Strict = Annotated[
    bool,
    Field(
        description="Objects that name their properties, and arrays that name their items, allow no others, even where "
        "the schema is open. By default a schema means what JSON Schema says it means."
    ),
]
MaxWhitespace = Annotated[
    int | None,
    Field(
        ge=1,
        description="Most whitespace characters in a row between the parts of a JSON text, so that no output runs on in "
        "spaces for ever; `null`: any number.",
    ),
]


class XGrammarConfig(PluginConfig):
    """JSON schemas, regexes and EBNF by XGrammar. What it cannot honour whole is refused."""

    kind: Literal["xgrammar"] = "xgrammar"  # pyright: ignore[reportIncompatibleVariableOverride]
    threads: int = Field(
        default=8, ge=1, le=256, description="Threads of one compilation, and of the masks of a batch."
    )
    strict: Strict = False
    max_whitespace: MaxWhitespace = 20


class LLGuidanceConfig(PluginConfig):
    """JSON schemas, regexes, GBNF, Lark, choices and structural tags by llguidance. What it cannot honour whole is refused."""

    kind: Literal["llguidance"] = "llguidance"  # pyright: ignore[reportIncompatibleVariableOverride]
    threads: int = Field(default=4, ge=1, le=256, description="Threads that fill the masks of a batch.")
    max_whitespace: MaxWhitespace = 20
    max_items: int = Field(
        default=50_000,
        ge=1000,
        description="Most parser items of one step: about 20,000 take a millisecond. A request whose text needs more ends "
        "with an error.",
    )
    max_lexer_steps: int = Field(
        default=200_000,
        ge=1000,
        description="Most steps of the lexer in one step of decoding: about 14,000 take a millisecond.",
    )
    max_lexer_states: int = Field(
        default=100_000, ge=1000, description="Most states of the lexer of one request: 1 to 2 KB each."
    )


class OutlinesConfig(PluginConfig):
    """JSON schemas, regexes and choices by outlines-core, as one regex. What it cannot honour whole is refused."""

    kind: Literal["outlines"] = "outlines"  # pyright: ignore[reportIncompatibleVariableOverride]
    strict: Strict = False
    open_depth: int = Field(
        default=1,
        ge=0,
        le=4,
        description="Levels of arrays and objects in a value that the schema leaves open: a regex cannot leave that open. "
        "Each level doubles the size of the index.",
    )
    max_whitespace: MaxWhitespace = 8
    max_size: int = Field(
        default=50_000,
        ge=1,
        description="Characters of the regex with its repetitions written out. A larger one is refused before it is compiled.",
    )
    max_states: int = Field(
        default=10_000, ge=1, description="States of the automaton of a regex; what would have more is refused."
    )
    max_transitions: int = Field(
        default=20_000_000,
        ge=1,
        description="Tokens allowed in all states together: the size of the index, at 18 bytes each. What would have more is "
        "refused.",
    )


class LMFormatEnforcerConfig(PluginConfig):
    """JSON schemas, regexes and choices by lm-format-enforcer, in Python. What it cannot honour whole is refused."""

    kind: Literal["lm_format_enforcer"] = "lm_format_enforcer"  # pyright: ignore[reportIncompatibleVariableOverride]
    strict: Strict = False
    max_whitespace: MaxWhitespace = 20
    max_size: int = Field(
        default=50_000,
        ge=1,
        description="Characters of a regex with its repetitions written out, and parts of a schema as a pattern. What has more is "
        "refused.",
    )
    max_work: int = Field(
        default=500_000,
        ge=1000,
        description="Most places of a grammar that one mask, or one token, may look at: about a microsecond each. A request whose text "
        "needs more ends with an error.",
    )
    cache_bytes: int = Field(
        default=4 * 2**20,
        ge=0,
        description="Most memory for the masks that one grammar remembers; the rest are computed again where they are needed.",
    )

"""Define the settings, one class per component. ``kind`` is the component's name, and every other field has a
default."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dovetail.config.plugin import PluginConfig


class EagerConfig(PluginConfig):
    """Hold the settings of ``attention: example_eager``."""

    kind: Literal["example_eager"] = "example_eager"


class PagesConfig(PluginConfig):
    """Hold the settings of ``cache: example_pages``."""

    kind: Literal["example_pages"] = "example_pages"


class ChoicesConfig(PluginConfig):
    """Hold the settings of ``grammar: example_choices``."""

    kind: Literal["example_choices"] = "example_choices"
    max_choices: int = Field(default=1000, ge=1, description="A constraint with more choices is refused.")


class BigramConfig(PluginConfig):
    """Hold the settings of ``speculative: example_bigram``."""

    kind: Literal["example_bigram"] = "example_bigram"
    num_draft_tokens: int = Field(default=4, ge=1, le=64, description="The largest number of tokens of a draft.")


class ShortestConfig(PluginConfig):
    """Hold the settings of ``policy: example_shortest``."""

    kind: Literal["example_shortest"] = "example_shortest"
    tokens_per_second: float = Field(
        default=200.0,
        gt=0,
        description="The number of tokens by which a prompt counts as shorter for each second of waiting.",
    )


class ExampleConfig(PluginConfig):
    """Hold the settings of ``model: {arch: example}``."""

    kind: Literal["example"] = "example"


class CallLinesConfig(PluginConfig):
    """Hold the settings of ``tool_parser: example_lines``."""

    kind: Literal["example_lines"] = "example_lines"


class CommentsConfig(PluginConfig):
    """Hold the settings of ``reasoning_parser: example_comments``."""

    kind: Literal["example_comments"] = "example_comments"


class LineConfig(PluginConfig):
    """Hold the settings of ``api: example_line``."""

    kind: Literal["example_line"] = "example_line"
    tokens: int = Field(default=16, ge=1, description="The largest number of tokens of an answer.")

"""Define what a prompt rewriter implements."""

from __future__ import annotations

from abc import ABC, abstractmethod

from dovetail.config.plugin import PluginConfig
from dovetail.interfaces.prompts import PromptContext


class PromptRewriter(ABC):
    """Rewrite prompts before they are tokenized. One instance serves all requests, from several threads."""

    @abstractmethod
    def __init__(self, config: PluginConfig, context: PromptContext) -> None:
        """Prepare what all prompts share. Raises ``ConfigError`` for settings that cannot be used."""

    @abstractmethod
    def rewrite(self, text: str) -> str:
        """Return the text to be tokenized in the place of ``text``. The same text always gives the same result."""

"""Rewrite prompts."""

from __future__ import annotations

import re
import unicodedata

from dovetail.errors import ConfigError
from dovetail.interfaces.prompts import PromptContext
from dovetail_prompt_rewriters.config import NormalizeConfig, RedactConfig
from dovetail_prompt_rewriters.interface import PromptRewriter


class Normalize(PromptRewriter):
    """Bring text to a Unicode normal form."""

    def __init__(self, config: NormalizeConfig, context: PromptContext) -> None:
        self._form = config.form

    def rewrite(self, text: str) -> str:
        """See ``PromptRewriter``."""
        return unicodedata.normalize(self._form, text)


class Redact(PromptRewriter):
    """Replace text that matches one of the patterns. The text must be in a Unicode normal form, because patterns do not
    match other spellings."""

    def __init__(self, config: RedactConfig, context: PromptContext) -> None:
        self._mask = config.mask
        try:
            self._patterns = [re.compile(pattern) for pattern in config.patterns]
        except re.error as error:
            raise ConfigError(f"prompt_rewriter.patterns has {error.pattern!r}: {error}") from error

    def rewrite(self, text: str) -> str:
        """See ``PromptRewriter``."""
        for pattern in self._patterns:
            text = pattern.sub(lambda match: self._mask, text)
        return text

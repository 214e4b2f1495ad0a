from typing import ClassVar

from dovetail_prompt_rewriters.testing import PromptRewriterSuite


class TestNormalize(PromptRewriterSuite):
    name = "normalize"
    examples: ClassVar = {"cafe\u0301": "caf\u00e9", "plain": "plain"}


class TestCompatibility(PromptRewriterSuite):
    name = "normalize"
    settings: ClassVar = {"form": "NFKC"}
    examples: ClassVar = {"\ufb01ne": "fine"}


class TestRedact(PromptRewriterSuite):
    name = "redact"
    examples: ClassVar = {"write to ada@example.org today": "write to [redacted] today", "no address": "no address"}


class TestOwnPatterns(PromptRewriterSuite):
    name = "redact"
    settings: ClassVar = {"patterns": (r"\d+",), "mask": "#"}
    examples: ClassVar = {"flat 12": "flat #"}

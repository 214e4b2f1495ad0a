"""Test the reasoning parsers: the suite for each, and their own behaviour.

Run: python -m pytest -q tests/plugins/test_parsers_reasoning.py
"""

from __future__ import annotations

import pytest

from dovetail.interfaces.parsers import ConstraintGate, ParserContext, ReasoningParser
from dovetail.testing.parsers import ReasoningParserSuite
from dovetail_parsers.config import DeepseekR1Config, GptOssReasoningConfig, Qwen3ReasoningConfig
from dovetail_parsers.harmony import GptOssReasoning
from dovetail_parsers.think import DeepseekR1, Qwen3

OPENED = "<|im_start|>assistant\n<think>\n"
CLOSED = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
BARE = "<|im_start|>assistant\n"
QWEN = Qwen3(Qwen3ReasoningConfig(), ParserContext())
R1 = DeepseekR1(DeepseekR1Config(), ParserContext())
GPT_OSS = GptOssReasoning(GptOssReasoningConfig(), ParserContext())


class TestQwen3(ReasoningParserSuite):
    name = "qwen3"
    prompts = (OPENED, BARE)

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        return ("" if prompt == OPENED else "<think>\n") + f"{reasoning}\n</think>\n\n{answer}"


class TestDeepseekR1(ReasoningParserSuite):
    name = "deepseek_r1"
    prompts = (OPENED, BARE)

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        return f"{reasoning}\n</think>\n\n{answer}"


class TestGptOss(ReasoningParserSuite):
    name = "gpt_oss"

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        final = f"<|start|>assistant<|channel|>final<|message|>{answer}<|return|>"
        return f"<|channel|>analysis<|message|>{reasoning}<|end|>{final}"


def parse(parser: ReasoningParser, prompt: str, text: str) -> tuple[str, str]:
    stream = parser.stream(prompt)
    return tuple(a + b for a, b in zip(stream.feed(text), stream.finish(), strict=True))


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "found"),
    [
        (QWEN, BARE, "\n\nParis.\n", ("", "\n\nParis.\n")),
        (QWEN, CLOSED, "a </think> b", ("", "a </think> b")),
        (QWEN, BARE, "a <think>b</think>", ("", "a <think>b</think>")),
        (QWEN, OPENED, "<think>\nhm\n</think>yes", ("hm", "yes")),
        (QWEN, OPENED, "it breaks off </thin", ("it breaks off </thin", "")),
        (QWEN, f"<think> {BARE}", "x", ("", "x")),
        (QWEN, OPENED, "a</think>\nb <think>c</think>d", ("a", "b <think>c</think>d")),
        (QWEN, BARE, "<think>a</think><think>\nb</think>\n\nc", ("a", "<think>\nb</think>\n\nc")),
        (QWEN, OPENED, "a <think>b</think></think>c", ("a <think>b", "</think>c")),
        (R1, BARE, "a</think>b<think>c", ("a", "b<think>c")),
        (R1, BARE, "hm</think>yes", ("hm", "yes")),
        (R1, CLOSED, "yes", ("", "yes")),
        (GPT_OSS, "", "plain", ("", "plain")),
        (GPT_OSS, "", "<|channel|>odd<|message|>x<|end|>", ("", "<|channel|>odd<|message|>x<|end|>")),
        (
            GPT_OSS,
            "",
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
            "<|message|>{}<|call|>",
            ("a", "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>"),
        ),
    ],
)
def test_what_is_reasoning(parser: ReasoningParser, prompt: str, text: str, found: tuple[str, str]):
    assert parse(parser, prompt, text) == found
    stream = parser.stream(prompt)
    deltas = [*(stream.feed(character) for character in text), stream.finish()]
    assert tuple("".join(delta[i] for delta in deltas) for i in range(2)) == found


def test_gates():
    assert QWEN.gate(OPENED) == R1.gate(BARE) == ConstraintGate(until="</think>")
    assert QWEN.gate(CLOSED) is None
    assert QWEN.gate(BARE) == ConstraintGate(lead="<think>", optional=True, until="</think>")
    opens = Qwen3(Qwen3ReasoningConfig(), ParserContext("{%- if enable_thinking %}{{- '<think>\\n' -}}{% endif %}"))
    assert opens.gate(BARE) is None
    assert opens.gate(OPENED) == ConstraintGate(until="</think>")

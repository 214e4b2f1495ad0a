"""Define the config sections of the parsers."""

from __future__ import annotations

from typing import Literal

from dovetail.config.plugin import PluginConfig


class HermesConfig(PluginConfig):
    """Read calls written as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen 2.5 and 3, the embedded model."""

    kind: Literal["hermes"] = "hermes"  # pyright: ignore[reportIncompatibleVariableOverride]


class Llama3JsonConfig(PluginConfig):
    """Read a call that is the whole answer, `{"name": ..., "parameters": {...}}`: Llama 3.1 to 3.3."""

    kind: Literal["llama3_json"] = "llama3_json"  # pyright: ignore[reportIncompatibleVariableOverride]


class MistralToolsConfig(PluginConfig):
    """Read calls after `[TOOL_CALLS]`, as a JSON array or as name and arguments: Mistral."""

    kind: Literal["mistral"] = "mistral"  # pyright: ignore[reportIncompatibleVariableOverride]


class DeepseekConfig(PluginConfig):
    """Read calls between DeepSeek's marks: DeepSeek V3, R1 and V3.1."""

    kind: Literal["deepseek"] = "deepseek"  # pyright: ignore[reportIncompatibleVariableOverride]


class PythonicConfig(PluginConfig):
    """Read calls written as a Python list, `[name(argument=value), ...]`: Llama 3.2 and 4."""

    kind: Literal["pythonic"] = "pythonic"  # pyright: ignore[reportIncompatibleVariableOverride]


class GptOssToolsConfig(PluginConfig):
    """Read calls that are messages of the commentary channel of OpenAI's harmony format: gpt-oss."""

    kind: Literal["gpt_oss"] = "gpt_oss"  # pyright: ignore[reportIncompatibleVariableOverride]


class DeepseekR1Config(PluginConfig):
    """Read reasoning up to `</think>`, whether or not `<think>` is written: DeepSeek R1."""

    kind: Literal["deepseek_r1"] = "deepseek_r1"  # pyright: ignore[reportIncompatibleVariableOverride]


class Qwen3ReasoningConfig(PluginConfig):
    """Read reasoning between `<think>` and `</think>`, if the prompt or the output opens it: Qwen 3, the embedded model."""

    kind: Literal["qwen3"] = "qwen3"  # pyright: ignore[reportIncompatibleVariableOverride]


class GptOssReasoningConfig(PluginConfig):
    """Read reasoning in the analysis channel of OpenAI's harmony format: gpt-oss."""

    kind: Literal["gpt_oss"] = "gpt_oss"  # pyright: ignore[reportIncompatibleVariableOverride]

"""Register the parsers of this distribution. Imports no large package."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.registry.hookspecs import hookimpl
from dovetail.registry.specs import ComponentKind, ComponentSpec


def _spec(
    kind: ComponentKind,
    name: str,
    target: str,
    config: str,
    template: str,
    summary: str,
    priority: int = 0,
    aliases: tuple[str, ...] = (),  # what the flags of SGLang and vLLM call the parser
) -> ComponentSpec:
    return ComponentSpec(
        kind=kind,
        name=name,
        target=f"dovetail_parsers.{target}",
        config=f"dovetail_parsers.config:{config}",
        summary=summary,
        template=template,
        priority=priority,
        aliases=aliases,
    )


_TOOL, _REASONING = ComponentKind.TOOL_PARSER, ComponentKind.REASONING_PARSER

HERMES = _spec(
    _TOOL,
    "hermes",
    "hermes:Hermes",
    "HermesConfig",
    r"<tool_call>(\\n|\s)*\{",
    "<tool_call>{JSON}</tool_call>: Hermes, Qwen 2.5 and 3.",
    aliases=("qwen", "qwen25"),
)
MISTRAL = _spec(
    _TOOL, "mistral", "mistral:Mistral", "MistralToolsConfig", r"\[TOOL_CALLS\]", "[TOOL_CALLS] and the calls: Mistral."
)
DEEPSEEK = _spec(
    _TOOL,
    "deepseek",
    "deepseek:Deepseek",
    "DeepseekConfig",
    "<｜tool▁call▁begin｜>",
    "Marks around name and arguments: DeepSeek V3, R1, V3.1.",
    aliases=("deepseekv3", "deepseek_v3", "deepseekv31", "deepseek_v31"),
)
GPT_OSS_TOOLS = _spec(
    _TOOL,
    "gpt_oss",
    "harmony:GptOssTools",
    "GptOssToolsConfig",
    r"<\|channel\|>",
    "Messages to functions in harmony channels: gpt-oss.",
    aliases=("gpt-oss", "openai"),
)
LLAMA3_JSON = _spec(
    _TOOL,
    "llama3_json",
    "llama3_json:Llama3Json",
    "Llama3JsonConfig",
    r"\{\\?[\"']name\\?[\"']: function name, \\?[\"']parameters\\?[\"']",
    "A call as the whole answer, in JSON: Llama 3.1 to 3.3.",
    aliases=("llama3",),
)
PYTHONIC = _spec(
    _TOOL,
    "pythonic",
    "pythonic:Pythonic",
    "PythonicConfig",
    r"\[func_name1\(params_name1=params_value1",
    "A Python list of calls as the whole answer: Llama 3.2 and 4.",
)
QWEN3 = _spec(
    _REASONING,
    "qwen3",
    "think:Qwen3",
    "Qwen3ReasoningConfig",
    "</?think>",
    "<think> to </think>, where either is written.",
)
DEEPSEEK_R1 = _spec(
    _REASONING,
    "deepseek_r1",
    "think:DeepseekR1",
    "DeepseekR1Config",
    r"(?s)\A(?=.*<｜Assistant｜>).*</think>",
    "All up to </think>, whether or not <think> is written.",
    priority=10,
    aliases=("deepseek-r1",),
)
GPT_OSS_REASONING = _spec(
    _REASONING,
    "gpt_oss",
    "harmony:GptOssReasoning",
    "GptOssReasoningConfig",
    r"<\|channel\|>",
    "The analysis channel of harmony: gpt-oss.",
    aliases=("gpt-oss", "openai_gptoss"),
)


@hookimpl
def register_components() -> Sequence[ComponentSpec]:
    """Return the specs of a parser for each format of tool calls, and of a parser for each way to mark reasoning."""
    tools = (HERMES, LLAMA3_JSON, MISTRAL, DEEPSEEK, PYTHONIC, GPT_OSS_TOOLS)
    return (*tools, DEEPSEEK_R1, QWEN3, GPT_OSS_REASONING)

"""The parsers of this distribution. Imports nothing heavy."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.plugins.hookspecs import hookimpl
from dovetail.plugins.specs import ComponentKind, ComponentSpec


def _tools(name: str, target: str, config: str, summary: str, template: str, priority: int = 0) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.TOOL_PARSER,
        name=name,
        target=f"dovetail_parsers.{target}",
        config=f"dovetail_parsers.config:{config}",
        summary=summary,
        template=template,
        priority=priority,
    )


def _reasoning(name: str, target: str, config: str, summary: str, template: str, priority: int = 0) -> ComponentSpec:
    return ComponentSpec(
        kind=ComponentKind.REASONING_PARSER,
        name=name,
        target=f"dovetail_parsers.{target}",
        config=f"dovetail_parsers.config:{config}",
        summary=summary,
        template=template,
        priority=priority,
    )


@hookimpl
def register_tool_parsers() -> Sequence[ComponentSpec]:
    """One for each format of calls."""
    return (
        _tools(
            "hermes",
            "hermes:Hermes",
            "HermesConfig",
            "<tool_call>{JSON}</tool_call>: Hermes, Qwen 2.5 and 3.",
            r"<tool_call>(\\n|\s)*\{",
        ),
    )


@hookimpl
def register_reasoning_parsers() -> Sequence[ComponentSpec]:
    """One for each way to mark reasoning."""
    return (
        _reasoning("qwen3", "think:Qwen3", "Qwen3Config", "<think> to </think>, where either is written.", "</?think>"),
        _reasoning(
            "deepseek_r1",
            "think:DeepseekR1",
            "DeepseekR1Config",
            "All up to </think>, whether or not <think> is written.",
            r"(?s)\A(?=.*<｜Assistant｜>).*</think>",
            priority=10,
        ),
    )

"""Define the chat format of the model: special tokens, the Jinja template, and the same rendering in Python for
training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, START, END)
"""Ids 0, 1 and 2; removed when decoding with skip_special_tokens."""
TEXT_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Ids 3 to 8; one token each, but part of the visible text, because parsers read them."""
RESERVED_TOKENS = tuple(f"<|reserved_{i}|>" for i in range(7))
SPECIAL_TOKENS = CONTROL_TOKENS + TEXT_TOKENS + RESERVED_TOKENS

TOOLS_HEAD = "# Tools\n\nYou may call these functions:\n<tools>"
TOOLS_TAIL = (
    "</tools>\n\nTo call one, answer with its name and arguments:\n"
    '<tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>'
)

CHAT_TEMPLATE = (
    """{%- macro text(content) -%}
{%- if content is string -%}{{- content -}}
{%- elif content -%}{%- for part in content -%}{%- if part.text is defined -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- set turns = messages -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- text(messages[0].content) + '\\n\\n' -}}{%- set turns = messages[1:] -%}{%- endif -%}
{{- '__HEAD__' -}}
{%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
{{- '\\n__TAIL__<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in turns -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>\\n' + text(message.content) + '\\n</tool_response><|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + text(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' -}}
{{- (call.arguments if call.arguments is string else call.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{- '<think>\\n' -}}{%- endif -%}
{%- endif -%}
""".replace("__HEAD__", TOOLS_HEAD.replace("\n", "\\n"))
    .replace("__TAIL__", TOOLS_TAIL.replace("\n", "\\n"))
    .replace("-%}\n{", "-%}{")
    .replace("-}}\n{", "-}}{")
    .strip()
)
"""ChatML with optional tools (Hermes style) and an optional forced start of thinking."""


@dataclass(frozen=True, slots=True)
class Message:
    """Hold one message. `thought` is the assistant's reasoning before `content` when thinking is forced."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """Hold a piece of rendered text; `learn` marks text that the model must produce itself."""

    text: str
    learn: bool


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """Return the text of one tool call, as the template writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


def tools_text(system: str, tools: Sequence[dict[str, Any]]) -> str:
    """Return the content of a system turn that offers tools."""
    rows = [json.dumps(tool, ensure_ascii=False) for tool in tools]
    return "\n".join([f"{system}\n\n{TOOLS_HEAD}" if system else TOOLS_HEAD, *rows, TOOLS_TAIL])


def render(messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[Segment]:
    """Split a conversation into segments; joined, they equal the template's output."""
    out: list[Segment] = []
    if tools:
        system = messages[0].content if messages[0].role == "system" else ""
        messages = messages[1:] if messages[0].role == "system" else messages
        out.append(Segment(f"{START}system\n{tools_text(system, tools)}{END}\n", False))
    for message in messages:
        out += _render_message(message)
    return out


def _render_message(message: Message) -> list[Segment]:
    if message.role == "tool":
        return [Segment(f"{START}user\n<tool_response>\n{message.content}\n</tool_response>{END}\n", False)]
    if message.role != "assistant":
        return [Segment(f"{START}{message.role}\n{message.content}{END}\n", False)]
    head, reply = f"{START}assistant\n", message.content
    if message.thought:
        head, reply = f"{head}<think>\n", f"{message.thought}\n</think>\n\n{reply}"
    return [Segment(head, False), Segment(f"{reply}{END}", True), Segment("\n", False)]

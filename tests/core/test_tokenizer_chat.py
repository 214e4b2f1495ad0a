"""Test chat templates against transformers' own rendering, and templates that refuse a conversation.

.venv/bin/python -m pytest -q tests/core/test_tokenizer_chat.py
"""

import json
from pathlib import Path

import pytest

from dovetail.config.checkpoint import locate
from dovetail.errors import ConfigError, RequestError
from dovetail.tokenizer import Tokenizer

TINY = Tokenizer.from_dir(locate("tiny"))
TALK = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Où est-ce ?"},
    {"role": "assistant", "content": "Ici."},
    {"role": "user", "content": "And this?"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "note": "é <x>"}}}]


def tokenizer_with(directory: Path, **config: object) -> Tokenizer:
    (directory / "tokenizer.json").write_text(TINY.json, encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"} | config))
    return Tokenizer.from_dir(directory)


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(tools: list | None, prompt: bool):
    transformers = pytest.importorskip("transformers")
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(locate("tiny"))
    expected = reference.apply_chat_template(TALK, tools=tools, add_generation_prompt=prompt, tokenize=False)
    assert TINY.apply_chat_template(TALK, tools, prompt) == expected


def test_the_helpers_that_templates_expect(tmp_path: Path):
    template = (
        "{% for m in messages %}\n  {% if m.role == 'stop' %}{% break %}{% endif %}\n"
        "{% generation %}{{ m.content | tojson }}{% endgeneration %}{% endfor %}"
        "{{ eos_token }}{{ strftime_now('%Y') | length }}{{ mood }}"
    )
    tokenizer = tokenizer_with(tmp_path, chat_template=template)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "é<"}, {"role": "stop"}], extra={"mood": "!"})
    assert text == '"é<"<|im_end|>4!'


def test_a_refusal_reaches_the_user(tmp_path: Path):
    tokenizer = tokenizer_with(tmp_path, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        tokenizer.apply_chat_template(TALK)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template", ["{{ messages[9].content.x }}", "{{ messages + 1 }}", "{{ ''.__class__.__mro__ }}"]
)
def test_templates_that_break_are_request_errors(tmp_path: Path, template: str):
    with pytest.raises(RequestError, match="refuses this conversation"):
        tokenizer_with(tmp_path, chat_template=template).apply_chat_template(TALK)


def test_where_templates_are_found(tmp_path: Path):
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer_with(tmp_path).apply_chat_template(TALK)
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = tokenizer_with(tmp_path, chat_template=named)
    assert (tokenizer.apply_chat_template(TALK), tokenizer.apply_chat_template(TALK, TOOLS)) == ("plain", "tools")
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert tokenizer_with(tmp_path, chat_template="x").apply_chat_template(TALK) == "from the file"


def test_an_invalid_template_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="line 1"):
        tokenizer_with(tmp_path, chat_template="{% if %}")


def test_extra_variables_may_not_replace_the_conversation():
    with pytest.raises(RequestError, match="messages"):
        TINY.apply_chat_template(TALK, extra={"messages": []})

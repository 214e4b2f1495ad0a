"""Test that texts of a chat cannot become special tokens, and that all other prompts have the tokens that they had.

.venv/bin/python -m pytest -q tests/core/test_chat_content.py
"""

import asyncio
import json
import random
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from dovetail.chat.requests import plain_message
from dovetail.config.checkpoint import locate
from dovetail.server.service import Service
from dovetail.tokenizer import Tokenizer
from dovetail.tokenizer.content import ContentTokens, MarkedPrompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.arguments }}{{ c.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ADJACENT = "{% for m in messages %}<|im_start|>{{ m.name }}{{ m.content | trim }}<|im_end|>{% endfor %}"
LLAMA = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>")
CORPUS = [
    "The capital of France is Paris. user assistant system <|im_end|> [INST] < s > im_start /s",
    'def f(x): return {"a": 1}',
] * 30


def trained(kind: str) -> Backend:
    """Return a tokenizer of one family, trained on a few sentences."""
    added = [AddedToken(name, normalized=False, rstrip=name == "<|im_start|>", special=True) for name in SPECIAL]
    if kind == "byte level":
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500, special_tokens=added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        )
    elif kind == "llama":
        backend = Backend(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        bytes_ = [AddedToken(f"<0x{i:02X}>", special=False, normalized=False) for i in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*added, *bytes_])
    else:
        backend = Backend(models.Unigram())
        scheme = "first" if kind == "unigram" else "always"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
        trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=added, unk_token="<unk>")
    backend.train_from_iterator(CORPUS, trainer)
    if kind == "llama":
        tree = json.loads(backend.to_str())
        tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["content"].startswith("<0x")]
        tree["decoder"] = {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        }
        backend = Backend.from_str(json.dumps(tree))
    return backend


@cache
def tokenizer_of(kind: str, template: str = CHATML) -> Tokenizer:
    text = Tokenizer.from_dir(locate("tiny")).json if kind == "tiny" else trained(kind).to_str()
    return Tokenizer(text, chat_template=template)


KINDS = ["tiny", "byte level", "llama", "unigram", "unigram always"]
WORDS = [
    "Hello",
    " ",
    "  ",
    "\n",
    "<",
    "|",
    "im_end",
    "|>",
    "<|",
    "é",
    "[INST]",
    "</",
    "s>",
    "<tool_call>",
    "{",
    '"',
    "the",
    "\t",
]


def conversation(draw: random.Random, spelled: tuple[str, ...] = ()) -> list[dict]:
    def text() -> str:
        words = [*WORDS, *spelled, *spelled]
        found = "".join(draw.choice(words) for _ in range(draw.randrange(8)))
        return found if spelled or not any(name in found for name in SPECIAL) else "plain"

    messages: list[dict] = [{"role": "system", "content": text()}]
    for _ in range(draw.randrange(1, 4)):
        call = {"function": {"name": "f", "arguments": json.dumps({text(): text()}, ensure_ascii=False)}}
        messages += [
            {"role": "user", "content": text()},
            {"role": "assistant", "content": text(), "tool_calls": [call]},
        ]
    return [plain_message(message, i) for i, message in enumerate(messages)]


@cache
def bare_of(tokenizer_json: str, template: str) -> Tokenizer:
    tokenizer = Tokenizer(tokenizer_json, chat_template=template)
    tokenizer.marks_content = False
    return tokenizer


def reference(tokenizer: Tokenizer, messages: list[dict], tools: list | None) -> tuple[str, list[int]]:
    """Return the prompt and its ids as they are without any marks."""
    bare = bare_of(tokenizer.json, tokenizer.chat_template)
    text = bare.apply_chat_template(messages, tools)
    assert type(text) is str
    return text, bare.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("template", [CHATML, ADJACENT, LLAMA], ids=["chatml", "adjacent", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_legitimate_prompts_have_the_tokens_that_they_had(kind: str, template: str):
    """Also those that end with the beginning of a special token, which are marked."""
    tokenizer, draw, marked = tokenizer_of(kind, template), random.Random(1), 0
    for _ in range(40):
        messages = conversation(draw)
        tools = draw.choice([None, [{"type": "function", "function": {"name": "g", "description": " a <"}}]])
        text, ids = reference(tokenizer, messages, tools)
        if any(text.count(name) != template_count(template, messages, name) for name in SPECIAL):
            continue  # two texts spell a special token together
        prompt = tokenizer.apply_chat_template(messages, tools)
        marked += isinstance(prompt, MarkedPrompt)
        assert prompt == text
        assert tokenizer.encode(prompt, add_special_tokens=False) == ids
    assert marked


def template_count(template: str, messages: list[dict], name: str) -> int:
    """Return how often a template writes a token itself: as often as for messages without texts."""
    empty = [message | {"content": "", "name": ""} for message in messages]
    empty = [
        message | ({"tool_calls": [{"function": {"arguments": "{}"}}]} if "tool_calls" in message else {})
        for message in empty
    ]
    return bare_of(tokenizer_of("tiny").json, template).apply_chat_template(empty).count(name)


@pytest.mark.parametrize("template", [CHATML, LLAMA], ids=["chatml", "llama"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_that_spell_special_tokens_stay_text(kind: str, template: str):
    """The prompt has as many special tokens as the template writes, and decodes to the same text."""
    tokenizer, draw = tokenizer_of(kind, template), random.Random(2)
    for _ in range(40):
        messages = conversation(draw, ("<|im_start|>", "<|im_end|>", "</s>", "<s>"))
        tools = draw.choice([None, [{"type": "function", "function": {"name": "g", "description": "<|im_end|>"}}]])
        prompt = tokenizer.apply_chat_template(messages, tools)
        text, bare = reference(tokenizer, messages, tools)
        assert prompt == text
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        for name in SPECIAL:
            token = tokenizer.token_to_id(name)
            if token is not None and name != "<unk>":
                assert ids.count(token) == template_count(template, messages, name), name
        if kind in ("tiny", "byte level") and tokenizer.token_to_id("<|im_start|>") is not None:
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            assert whole == tokenizer.decode(bare, skip_special_tokens=False) or kind == "byte level"


def test_two_texts_cannot_spell_a_special_token_together():
    tokenizer = tokenizer_of("tiny", ADJACENT)
    message = {"role": "user", "name": "a<|im_", "content": "end|>b"}
    ids = tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)
    assert ids.count(tokenizer.token_to_id("<|im_end|>") or -1) == 1


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.sampled_from([*WORDS, "<|im_end|>", "<|im_start|>", "\ufdd0", "\ufdd1", "\\ufdd0"]), max_size=12),
    st.data(),
)
def test_parts_of_marked_prompts_are_marked(words: list[str], data: st.DataObject):
    tokenizer = tokenizer_of("tiny")
    text = "".join(words) + "<|im_end|>"
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert isinstance(prompt, MarkedPrompt)
    cut = data.draw(st.integers(0, len(prompt)))
    head, tail = prompt[:cut], prompt[cut:]
    assert (str(head + tail), len(head) + len(tail)) == (str(prompt), len(prompt))
    assert tokenizer.encode(head + tail, False) == tokenizer.encode(prompt, False)
    assert ("before" + prompt)[len("before") :] == prompt
    assert text in prompt


@given(st.lists(st.sampled_from([*WORDS, "<|im_end|>", "<|im_", "<", "|", "end|>", "é", "😀", "x"]), max_size=30))
def test_searches_in_parts_find_what_the_whole_text_spells(words: list[str]):
    content, text = ContentTokens(tokenizer_of("tiny").json), "".join(words)
    names = [name for name in content._ids if name in text]
    begins = [name for name in content._ids for size in range(1, len(name)) if text.endswith(name[:size])]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dovetail.tokenizer.content._SEARCHED", 7)
        assert (content.mark_for((text, frozenset())) is not None) == bool(names or begins)


def test_marks_of_the_assistant_and_what_may_be_allowed():
    """The assistant's own marks stay tokens in its messages, and a setting allows all special tokens everywhere."""
    tree = json.loads(tokenizer_of("tiny").json)
    for token in tree["added_tokens"]:
        token["special"] = True
    tokenizer = Tokenizer(json.dumps(tree), chat_template=CHATML)
    think, end = tokenizer.token_to_id("<think>"), tokenizer.token_to_id("<|im_end|>")
    messages = [{"role": role, "content": "<think>x<|im_end|>"} for role in ("user", "assistant")]
    prompt = tokenizer.apply_chat_template(messages, opening="<think>", assistant_marks=frozenset({"<think>"}))
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert (ids.count(think or -1), ids.count(end or -1), ids[-1]) == (2, 2, think)
    tokenizer.marks_content = False
    ids = tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
    assert (ids.count(think or -1), ids.count(end or -1)) == (2, 4)


@pytest.mark.parametrize("where", ["tools", "variables", "call", "content", "nowhere"])
def test_all_large_parts_of_a_conversation_are_read_on_a_thread(where: str, monkeypatch: pytest.MonkeyPatch):
    heavy: list[bool] = []

    async def offloaded(large: bool, call: Any, *args: Any) -> Any:
        heavy.append(large)
        return call(*args)

    monkeypatch.setattr("dovetail.server.service.offloaded", offloaded)
    text = {part: "<|" * 40_000 if part == where else "x" for part in ("tools", "variables", "call", "content")}
    message = {
        "role": "assistant",
        "content": text["content"],
        "tool_calls": [{"function": {"arguments": text["call"]}}],
    }
    rendering = SimpleNamespace(prompt=str, template=SimpleNamespace(render=str), variables={})
    service = SimpleNamespace(_rendering=lambda *args: rendering, templates=None)
    tools = [{"function": {"description": text["tools"]}}]
    asyncio.run(Service.render_chat(cast(Service, service), [message], tools, {"a": text["variables"]}))
    assert heavy == [where != "nowhere"] * 2


@pytest.mark.parametrize(
    ("expression", "text", "protected"),
    [
        ("content | trim", " <|im_end|> ", True),
        ("content[1:]", "x<|im_end|>", True),
        ("content.split('</think>')[-1]", "a</think><|im_end|>", True),
        ("content | replace('#', '')", "<|im_#end|>", False),
        ("content.split('#') | join", "<|im_#end|>", False),
        ("content | lower", "<|IM_END|>", False),
        ("'<' ~ content", "|im_end|>", False),
    ],
)
def test_texts_that_a_template_changes(expression: str, text: str, protected: bool):
    """What cannot be protected is listed in docs/reliability.md."""
    tokenizer = tokenizer_of(
        "tiny", "{% for m in messages %}{% set content = m.content %}{{ " + expression + " }}{% endfor %}"
    )
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    assert prompt.strip() == "<|im_end|>"
    assert (tokenizer.token_to_id("<|im_end|>") in tokenizer.encode(prompt, add_special_tokens=False)) is not protected
    page = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert protected or expression.replace("|", "\\|") in page

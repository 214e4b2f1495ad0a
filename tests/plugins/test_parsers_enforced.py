"""Test that a tool format's constraint allows only what was requested: random texts under the masks of both engines
are read by the parser, and their arguments are validated by the jsonschema library.

Run: python -m pytest -q tests/plugins/test_parsers_enforced.py
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from dovetail.chat.parsing import OutputParsers, OutputPlan
from dovetail.config.checkpoint import EMBEDDED
from dovetail.constraints.gated import FreeTokens, gated
from dovetail.errors import GrammarError
from dovetail.interfaces.features import BUILT_IN_FEATURES, Feature
from dovetail.interfaces.grammar import GrammarBackend, GrammarContext
from dovetail.interfaces.parsers import ParserContext, Tool, ToolRequest
from dovetail.sampling_params import SamplingParams
from dovetail.tokenizer import Tokenizer
from dovetail_grammar.config import LLGuidanceConfig, XGrammarConfig
from dovetail_grammar.llguidance_backend import LLGuidanceBackend
from dovetail_grammar.xgrammar_backend import XGrammarBackend
from dovetail_parsers.config import (
    DeepseekConfig,
    GptOssToolsConfig,
    HermesConfig,
    Llama3JsonConfig,
    MistralToolsConfig,
    PythonicConfig,
)
from dovetail_parsers.deepseek import Deepseek
from dovetail_parsers.harmony import GptOssTools
from dovetail_parsers.hermes import Hermes
from dovetail_parsers.llama3_json import Llama3Json
from dovetail_parsers.mistral import Mistral
from dovetail_parsers.pythonic import Pythonic

EOS = (0, 2)
EVERY_FEATURE = frozenset(Feature(descriptor.name) for descriptor in BUILT_IN_FEATURES)
TAG = {
    "type": "object",
    "properties": {"key": {"type": "boolean"}, "value": {"type": ["number", "null"]}},
    "required": ["key"],
    "additionalProperties": False,
}
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 5},
        "count": {"$ref": "#/$defs/count"},
        "unit": {"enum": ["C", "°F", 'a "b"\\', None, 2]},
        "tags": {"type": "array", "items": TAG, "minItems": 1, "maxItems": 2},
        "note": {
            "anyOf": [
                {"type": "string", "maxLength": 3},
                {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
            ]
        },
    },
    "required": ["city", "unit", "tags"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}
NUMBERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["b"],
    "additionalProperties": False,
}
A, B = Tool("get_weather", PARAMETERS, strict=True), Tool("add", NUMBERS, strict=True)
LOOSE = Tool("get", {"type": "object", "properties": {"x": {"type": "integer"}}})
MODES = {
    "required": ToolRequest((A, B), required=True),
    "one": ToolRequest((A, B), required=True, parallel=False),
    "named": ToolRequest((A,), required=True, parallel=False),
    "strict": ToolRequest((A, B, LOOSE)),
}
FORMATS: dict[str, tuple[Any, Any, str, str]] = {  # class, config, chat template, how a call begins
    "hermes": (Hermes, HermesConfig, "", "Well. <tool_call>"),
    "llama3_json": (Llama3Json, Llama3JsonConfig, "", "{"),
    "mistral": (Mistral, MistralToolsConfig, "", "Well. [TOOL_CALLS]"),
    "mistral, named": (Mistral, MistralToolsConfig, "[ARGS]", "[TOOL_CALLS]"),
    "deepseek": (Deepseek, DeepseekConfig, "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"),
    "deepseek, fenced": (Deepseek, DeepseekConfig, "```json", "<｜tool▁call▁begin｜>"),
    "pythonic": (Pythonic, PythonicConfig, "", "["),
    "gpt_oss": (
        GptOssTools,
        GptOssToolsConfig,
        "",
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=",
    ),
}
LARK_ALONE = {("llama3_json", "strict"), *(("gpt_oss", mode) for mode in MODES)}
CASES = [
    pytest.param(
        name, special, id=f"{name}-{'special' if special else 'text'}", marks=() if usual else pytest.mark.full
    )
    for index, name in enumerate(FORMATS)
    for special, usual in ((bool(index % 2), True), (not index % 2, False))
]
"""Each format with marks that are text, or with special tokens, and in the full run with both."""
PARALLEL = ("hermes", "mistral", "mistral, named", "deepseek", "pythonic")


def tokenizer_with(marks: tuple[str, ...], directory: Path) -> Tokenizer:
    """Return the embedded model's tokenizer, with ``marks`` as special tokens."""
    shutil.copytree(EMBEDDED["tiny"], directory, dirs_exist_ok=True)
    path = directory / "tokenizer.json"
    given = json.loads(path.read_text(encoding="utf-8"))
    for i, mark in enumerate(marks):
        found = [token for token in given["added_tokens"] if token["content"] == mark]
        token = found[0] if found else next(t for t in given["added_tokens"] if t["content"] == f"<|reserved_{i}|>")
        old, token["content"], token["special"] = token["content"], mark, True
        if old in given["model"]["vocab"]:
            given["model"]["vocab"][mark] = given["model"]["vocab"].pop(old)
    path.write_text(json.dumps(given), encoding="utf-8")
    return Tokenizer.from_dir(directory)


class Setting:
    """Describe a format, for a model whose marks are special tokens or plain text."""

    def __init__(self, name: str, special: bool, directory: Path) -> None:
        made, config, template, self.begin = FORMATS[name]
        self.tokenizer = tokenizer_with(made.special_tokens if special else (), directory)
        t = self.tokenizer
        specials = frozenset(t.bytes_of(i).decode() for i in t.special_token_ids)
        parser = made(config(), ParserContext(template, specials))
        self.parsers = OutputParsers(t, parser, None, EVERY_FEATURE)
        texts = [None if i in t.special_token_ids else t.bytes_of(i) for i in range(t.vocab_size)]
        context = GrammarContext(t.vocab_size, texts, EOS, "{}")
        self.backends: dict[str, GrammarBackend] = {
            "xgrammar": XGrammarBackend(XGrammarConfig(), context),
            "llguidance": LLGuidanceBackend(LLGuidanceConfig(), context),
        }
        self.weights = np.ones(t.vocab_size)
        self.weights[list(EOS)] = 40.0
        for end in '"{[]}(),:':
            self.weights[t.encode(end, add_special_tokens=False)] = 60.0

    def write(self, plan: OutputPlan, backend: str, begin: str, rng: np.random.Generator) -> tuple[str, bool]:
        """Return a random text under the constraint, and whether it is complete."""
        size = self.tokenizer.vocab_size
        grammar = plan.params.grammar
        assert grammar is not None
        compiled = self.backends[backend].compile(grammar)
        matcher = gated(compiled.matcher(), plan.params.grammar_gate, FreeTokens(size, EOS))
        ids = self.tokenizer.encode(begin, add_special_tokens=False) if begin else []
        assert all(matcher.accept(token) for token in ids), f"{begin!r} is not allowed"
        while len(ids) < 400 and not matcher.is_terminated and ids[-1:] not in ([0], [2]):
            row = np.zeros((1, -(-size // 32)), np.int32)
            matcher.fill_bitmask(row, 0)
            allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
            weights = self.weights[allowed]
            ids.append(int(rng.choice(allowed, p=weights / weights.sum())))
            assert matcher.accept(ids[-1])
            if len(ids) % 7 == 0:
                matcher.rollback(1)
                assert matcher.accept(ids[-1])
        ended = matcher.is_terminated or ids[-1] in EOS
        return self.tokenizer.decode([i for i in ids if i not in EOS], skip_special_tokens=False), ended


def read(plan: OutputPlan, text: str) -> list[tuple[str, str]]:
    """Return (name, arguments) of the calls in a text."""
    reader, found = plan.reader(), list[list[str]]()
    for part in (reader.feed(text), reader.finish()):
        for call in part.calls:
            if call.name is not None:
                found.append([call.name, ""])
            found[-1][1] += call.arguments
    return [(name, arguments) for name, arguments in found]


@pytest.mark.parametrize(("name", "special"), CASES)
def test_what_the_masks_allow_is_what_was_asked_for(name: str, special: bool, tmp_path: Path):
    setting, rng = Setting(name, special, tmp_path), np.random.default_rng(1)
    for mode, request in MODES.items():
        plan = setting.parsers.plan(SamplingParams(), "", request)
        numbers: list[int] = []
        for backend in setting.backends:
            if backend == "xgrammar" and (name, mode) in LARK_ALONE:
                with pytest.raises(GrammarError, match="Lark"):
                    setting.backends[backend].compile(plan.params.grammar)
                continue
            for round_ in range(8):
                begin = setting.begin if round_ % 2 and (mode == "strict" or name == "gpt_oss") else ""
                text, ended = setting.write(plan, backend, begin, rng)
                calls = read(plan, text)
                for tool_name, arguments in calls if ended else calls[:-1]:
                    tool = next(tool for tool in request.tools if tool.name == tool_name)
                    if tool.strict:
                        jsonschema.validate(json.loads(arguments), tool.parameters)
                assert calls or not ended or not (request.required or begin), text
                assert len(calls) <= 1 or request.parallel
                numbers.append(len(calls))
        assert sum(numbers) >= 4, f"{mode}: too few calls to say anything: {numbers}"


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("name", PARALLEL)
def test_several_calls_are_allowed(name: str, special: bool, tmp_path: Path):
    setting, rng = Setting(name, special, tmp_path), np.random.default_rng(2)
    bare = {"type": "object", "properties": {"b": {"enum": [1]}}, "required": ["b"], "additionalProperties": False}
    request = ToolRequest((Tool("add", bare),), required=True)
    plan = setting.parsers.plan(SamplingParams(), "", request)
    made = {
        "hermes": 2 * '<tool_call>\n{"name": "add", "arguments": {"b": 1}}\n</tool_call>',
        "deepseek": "<｜tool▁calls▁begin｜>" + 2 * '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"b": 1}<｜tool▁call▁end｜>',
        "mistral": f"[TOOL_CALLS][{', '.join(2 * [json.dumps({'name': 'add', 'arguments': {'b': 1}})])}]",
        "mistral, named": 2 * '[TOOL_CALLS]add[ARGS]{"b": 1}',
        "pythonic": "[add(b=1), add(b=1)]",
    }[name]
    for backend in setting.backends:
        text, _ = setting.write(plan, backend, made.removesuffix("]"), rng)
        calls = read(plan, text)
        assert calls[:2] == 2 * [("add", '{"b": 1}')], text


def test_a_strict_answer_may_be_text(tmp_path: Path):
    """Text that is not a call stays as free as it can be."""
    texts = {
        "hermes": 'Use {"name": "add"} and [x] or <tool_cal>.',
        "llama3_json": 'Like this: {"name": "add", "parameters": 3}',
        "mistral": 'A list: [{"name": "add"}]',
        "deepseek": "Use <｜tool▁sep｜> or not.",
        "pythonic": "See [add(a=1)] or {x}.",
        "gpt_oss": "<|channel|>final<|message|>See to=functions.add {}",
    }
    for name, text in texts.items():
        setting = Setting(name, False, tmp_path / name)
        plan = setting.parsers.plan(SamplingParams(), "", MODES["strict"])
        for backend in setting.backends:
            if (name, "strict") not in LARK_ALONE or backend != "xgrammar":
                written, _ = setting.write(plan, backend, text, np.random.default_rng(3))
                assert written.startswith(text)

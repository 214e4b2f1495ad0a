"""Test how parsers are chosen: by name, or by the model's chat template.

Run: pytest tests/core/test_plugins_parsers.py
"""

from __future__ import annotations

import json

import pytest

from dovetail.errors import ResolutionError
from dovetail.registry import ComponentKind, Machine, Requirement, load_plugins, resolve
from dovetail.registry.resolution import CandidateVerdict, ChoiceRule, Stage

TOOL, REASONING = ComponentKind.TOOL_PARSER, ComponentKind.REASONING_PARSER


@pytest.fixture
def chosen(fakes, tmp_path):
    """Resolve with four parsers and, if given, a chat template beside the checkpoint."""

    def run(*sets, template=None, extra=()):
        specs = [
            fakes.spec(TOOL, "angle", template="<call>"),
            fakes.spec(TOOL, "square", template=r"\[call\]", priority=5),
            fakes.spec(TOOL, "plain"),
            fakes.spec(REASONING, "think", template="<think>"),
            *extra,
        ]
        tokenizer = tmp_path / "tokenizer"
        tokenizer.mkdir()
        if template is not None:
            (tokenizer / "chat_template.jinja").write_text(template)
        registry = fakes.registry(*specs)
        config = fakes.config(registry, f"model.tokenizer={tokenizer}", *sets)
        return resolve(config, registry, Machine.assume("cpu"))

    return run


def test_auto_follows_the_template(chosen):
    resolved = chosen(template="{{ messages }}<call>")
    assert resolved.tool_parser.name == "angle"
    assert resolved.reasoning_parser is None
    record = resolved.resolution("tool_parser")
    verdicts = {c.spec.name: (c.verdict, c.stage) for c in record.candidates}
    assert verdicts == {
        "angle": (CandidateVerdict.CHOSEN, Stage.FEATURES),
        "square": (CandidateVerdict.REJECTED, Stage.CONSTRAINTS),
        "plain": (CandidateVerdict.REJECTED, Stage.CONSTRAINTS),
    }
    assert record.note == "the chat template uses its format"
    (reason,) = resolved.resolution("reasoning_parser").candidates[0].reasons
    assert reason.fix == "reasoning_parser: think, if the model writes this format"


def test_of_several_that_match_the_priority_decides(chosen):
    assert chosen(template="<call> [call]").tool_parser.name == "square"


def test_no_template_no_parser(chosen):
    resolved = chosen()
    assert (resolved.tool_parser, resolved.reasoning_parser) == (None, None)
    assert resolved.resolution("tool_parser").note == "the model has no chat template"


def test_a_name_is_used_whatever_the_template_says(chosen):
    resolved = chosen("tool_parser=plain", "reasoning_parser=none", template="<call><think>")
    assert resolved.tool_parser.name == "plain"
    assert resolved.resolution("tool_parser").rule is ChoiceRule.EXPLICIT
    assert resolved.reasoning_parser is None
    assert resolved.resolution("reasoning_parser").note == "switched off by config"
    assert resolved.config.tool_parser.candidates[0].kind == "plain"
    assert resolved.config.reasoning_parser.disabled
    assert json.loads(json.dumps(resolved.to_json()))["chosen"]["tool_parser"]["name"] == "plain"


def test_a_name_that_cannot_be_used_stops(chosen, fakes):
    gone = fakes.spec(TOOL, "gone", requires=(Requirement("no-such-dist"),))
    with pytest.raises(ResolutionError, match=r"tool_parser: cannot use what config names\n.*no-such-dist"):
        chosen("tool_parser=gone", extra=[gone])


def test_a_template_that_is_no_pattern_is_refused(fakes):
    entry = fakes.entry("bad", [fakes.spec(TOOL, "bad", template="(")])
    registry = load_plugins(fakes.config(fakes.registry()).plugins, [entry])
    assert "template is '('; expected a regular expression" in registry.plugins[0].reason

"""Outputs of chats taken apart: reasoning, content, tool calls; and the constraints that make them come out so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dovetail.config import Config, PluginConfig
from dovetail.errors import GrammarError, RequestError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    CallDelta,
    Gate,
    ParserContext,
    ReasoningParser,
    ReasoningStream,
    Tool,
    ToolConstraint,
    ToolParser,
    ToolRequest,
    ToolStream,
)
from dovetail.plugins.registry import Registry
from dovetail.plugins.resolution import Chosen
from dovetail.plugins.specs import ComponentKind
from dovetail.tokenizer import Tokenizer
from dovetail.types import GrammarGate, SamplingParams


class ChatDelta(NamedTuple):
    """What new text of an output turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class OutputReader:
    """One output: its text runs through the reasoning stream and then the tool stream, where there are any. With
    ``single``, calls after the first are left out."""

    def __init__(self, reasoning: ReasoningStream | None, tools: ToolStream | None, single: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._single = single
        self.calls = 0

    def feed(self, text: str) -> ChatDelta:
        """What is certain now."""
        reasoning, content = self._reasoning.feed(text) if self._reasoning else ("", text)
        return self._called(reasoning, [content], last=False)

    def finish(self) -> ChatDelta:
        """What was held back. Called once, last."""
        reasoning, content = self._reasoning.finish() if self._reasoning else ("", "")
        return self._called(reasoning, [content], last=True)

    def _called(self, reasoning: str, texts: Sequence[str], last: bool) -> ChatDelta:
        if self._tools is None:
            return ChatDelta(reasoning, "".join(texts))
        deltas = [self._tools.feed(text) for text in texts if text]
        deltas += [self._tools.finish()] if last else []
        calls = [call for delta in deltas for call in delta.calls if not (self._single and call.index)]
        self.calls = max([self.calls, *(call.index + 1 for call in calls)])
        return ChatDelta(reasoning, "".join(delta.content for delta in deltas), tuple(calls))


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """How the outputs of one request are constrained and read."""

    params: SamplingParams
    parsers: OutputParsers
    prompt: str
    tools: ToolRequest | None
    separate_reasoning: bool

    @property
    def plain(self) -> bool:
        """True if outputs are shown as they are."""
        return self.tools is None and (self.parsers.reasoning is None or not self.separate_reasoning)

    def reader(self) -> OutputReader:
        """For one output."""
        reasoning, tool = self.parsers.reasoning, self.parsers.tool
        return OutputReader(
            reasoning.stream(self.prompt) if reasoning and self.separate_reasoning else None,
            tool.stream(self.tools.tools) if tool and self.tools else None,
            self.tools is not None and not self.tools.parallel,
        )


class OutputParsers:
    """The server's parsers. ``offers`` are the features of its grammar backends."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        offers: frozenset[Feature] = frozenset(),
    ) -> None:
        self.tool = tool
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._offers = offers

    def plan(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """What a request with this prompt needs. Raises ``RequestError`` where ``tools`` cannot be read or enforced."""
        gate = self.reasoning.gate(prompt) if self.reasoning else None
        marks: list[str] = list(self.reasoning.special_tokens) if self.reasoning and separate_reasoning else []
        if tools is not None:
            parser = self._tool_parser()
            marks += parser.special_tokens
            params = self._with_tools(params, parser, tools, gate)
        elif params.grammar is not None and gate is not None:
            params = replace(params, grammar_gate=self._in_tokens(gate))
        params = replace(params, keep_special=self._kept(marks))
        return ChatPlan(params, self, prompt, tools, separate_reasoning)

    def _tool_parser(self) -> ToolParser:
        if self.tool is None:
            raise RequestError(
                "this server has no tool parser for its model, so that it could not tell calls from text; start it with "
                "tool_parser: name (`dovetail explain` shows which there are), or give tool_choice: none",
                param="tools",
                code="unsupported_parameter",
            )
        return self.tool

    def _with_tools(
        self, params: SamplingParams, parser: ToolParser, tools: ToolRequest, reasoning: Gate | None
    ) -> SamplingParams:
        end = self._tokenizer.token_to_id(parser.call_end) if parser.call_end and not tools.parallel else None
        if end is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        if params.grammar is not None:
            raise RequestError(
                "tools and a constraint on the answer (response_format, or another) cannot both hold; for an answer give "
                "tool_choice: none",
                param="tools",
            )
        constraint = parser.constraint(tools, self._offers)
        if constraint is None:
            return params
        gate = self._in_tokens(_joined(constraint, reasoning))
        return replace(params, grammar=constraint.grammar, grammar_gate=gate)

    def _in_tokens(self, gate: Gate) -> GrammarGate | None:
        """The gate in token ids; None for one that does nothing."""
        if gate == Gate():
            return None
        until = self._tokenizer.token_to_id(gate.until) if gate.until else None
        if gate.until and until is None:
            raise GrammarError(
                f"a constraint would have to wait for {gate.until!r}, which is no token of this model: its output cannot be "
                "constrained",
                keyword="until",
            )
        return GrammarGate(
            self._encoded(gate.lead),
            gate.optional,
            until,
            gate.may_end,
            self._encoded(gate.prefix),
            gate.prefix_in_grammar,
        )

    def _encoded(self, text: str) -> tuple[int, ...]:
        ids = self._tokenizer.encode(text, add_special_tokens=False) if text else []
        if self._tokenizer.decode(ids, skip_special_tokens=False) != text:
            raise GrammarError(
                f"this model's tokenizer cannot write {text!r}, which a constraint needs", keyword="prefix"
            )
        return tuple(ids)

    def _kept(self, marks: Iterable[str]) -> tuple[int, ...]:
        ids = {self._tokenizer.token_to_id(mark) for mark in marks}
        return tuple(sorted(i for i in ids if i is not None and i in self._tokenizer.special_token_ids))


def _joined(constraint: ToolConstraint, reasoning: Gate | None) -> Gate:
    """The constraint's gate behind the reasoning."""
    gate = constraint.gate
    if reasoning is None or constraint.covers_reasoning:
        return gate
    if gate.lead or gate.until:
        raise GrammarError(
            "strict tools with tool_choice 'auto' cannot be enforced here for a model that reasons first; drop strict, or set "
            "tool_choice to 'required'",
            param="tools",
            keyword="strict",
        )
    return replace(reasoning, prefix=reasoning.prefix + gate.prefix, prefix_in_grammar=gate.prefix_in_grammar)


def tool_request(tools: Sequence[Tool], choice: str | None, named: str | None, parallel: bool) -> ToolRequest | None:
    """The calls that ``tools`` and ``tool_choice`` ask for; None where there are to be none. Raises ``RequestError``."""
    if not tools and (named or choice == "required"):
        raise RequestError(f"tool_choice is {named or choice!r} and there are no tools", param="tool_choice")
    if not tools or choice == "none":
        return None
    names = [tool.name for tool in tools]
    doubled = next((name for name in names if names.count(name) > 1), None)
    if doubled is not None:
        raise RequestError(f"tools has the function {doubled!r} twice", param="tools")
    for tool in tools:
        _check_parameters(tool)
    if named is not None and named not in names:
        raise RequestError(
            f"tool_choice names {named!r}, which is none of the tools: {', '.join(names)}", param="tool_choice"
        )
    wanted = tuple(tool for tool in tools if named in (None, tool.name))
    return ToolRequest(wanted, named is not None or choice == "required", parallel and named is None)


def _check_parameters(tool: Tool) -> None:
    """Arguments have names, so that they are an object: parsers would take no other call for one."""
    given = tool.parameters.get("type", "object")
    if given != "object":
        raise RequestError(
            f"the parameters of function {tool.name!r} have type {given!r:.80}; allowed: 'object'", param="tools"
        )


def load_parsers(info: Mapping[str, Any], config: Config, tokenizer: Tokenizer, registry: Registry) -> OutputParsers:
    """The parsers that the engine has resolved, by its ``info``. Raises ``PluginError``."""
    resolved = info["resolved"]
    names: list[str] = resolved.get("grammars") or []
    offers = [registry.get(ComponentKind.GRAMMAR, name).spec.offers for name in names]
    specials = frozenset(tokenizer.bytes_of(i).decode("utf-8", "replace") for i in tokenizer.special_token_ids)
    context = ParserContext(tokenizer.tool_template, specials)

    def built(kind: ComponentKind) -> Any:
        part = resolved["chosen"].get(kind)
        if part is None:
            return None
        component = registry.get(kind, part["name"])
        asked: tuple[PluginConfig, ...] = getattr(config, kind).candidates
        default = registry.config_class(kind, part["name"])(kind=part["name"])
        section = next((section for section in asked if section.kind == part["name"]), default)
        return Chosen(component, section).build(context)

    return OutputParsers(
        tokenizer, built(ComponentKind.TOOL_PARSER), built(ComponentKind.REASONING_PARSER), frozenset().union(*offers)
    )

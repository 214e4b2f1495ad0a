"""Constrain the outputs of a chat to the tool calls that the client requests, and choose the parsers that read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from dovetail.chat.reading import OutputReader, Stops
from dovetail.config import Config
from dovetail.errors import GrammarError, RequestError, UnknownComponentError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    ConstraintGate,
    ParserContext,
    ReasoningParser,
    ToolConstraint,
    ToolParser,
    ToolRequest,
)
from dovetail.registry.installed import Registry
from dovetail.registry.resolution import Chosen, reported
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import GrammarGate, SamplingParams, ThinkingSpan
from dovetail.tokenizer import Tokenizer
from dovetail.tokenizer.content import CONTROL_SHAPE


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """Describe how the outputs of one request are constrained and read."""

    params: SamplingParams
    parsers: OutputParsers
    prompt: str
    tools: ToolRequest | None
    separate_reasoning: bool
    stops: Stops | None = None

    def reader(self) -> OutputReader:
        """Return a new reader for one output."""
        reasoning, tool = self.parsers.reasoning, self.parsers.tool
        return OutputReader(
            reasoning.stream(self.prompt) if reasoning and self.separate_reasoning else None,
            tool.stream(self.tools.tools) if tool and self.tools else None,
            self.tools is not None and not self.tools.parallel,
            self.stops,
        )


def _none_named(kind: ComponentKind, name: str) -> Any:
    raise UnknownComponentError(f"no {kind} is called {name!r:.80}")


class OutputParsers:
    """Hold the tool parser and the reasoning parser of a model. ``offers`` are the features of the grammar backends in
    use."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool: ToolParser | None = None,
        reasoning: ReasoningParser | None = None,
        offers: frozenset[Feature] = frozenset(),
        named: Callable[[ComponentKind, str], Any] = _none_named,
    ) -> None:
        """``named`` builds another installed parser, of a kind and a name."""
        self.named = named
        self.tool = tool
        self.reasoning = reasoning
        self._tokenizer = tokenizer
        self._offers = offers

    @cached_property
    def assistant_marks(self) -> frozenset[str]:
        """Return the special tokens that earlier messages of the assistant may spell: those with which it reasons and
        calls tools, except those that look like the tokens between turns."""
        marks = {mark for parser in (self.tool, self.reasoning) if parser for mark in parser.special_tokens}
        return frozenset(mark for mark in marks if not CONTROL_SHAPE.fullmatch(mark))

    def plan(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> OutputPlan:
        """Plan how the outputs of a request with this prompt are constrained and read. Raises ``RequestError`` if calls
        of ``tools`` cannot be read or enforced.

        With tools, the reader instead of the engine finds stop strings, because the engine cannot distinguish calls
        from content.
        """
        prompt = str(prompt)  # marks are of no use here
        gate = self.reasoning.gate(prompt) if self.reasoning else None
        params = self._budgeted(params, gate)
        stops = Stops.of(params) if tools else None
        marks: list[str] = list(self.reasoning.special_tokens) if self.reasoning and separate_reasoning else []
        if tools is not None:
            parser = self._tool_parser()
            marks += parser.special_tokens
            params = self._with_tools(replace(params, stop=(), stop_regex=()), parser, tools, gate)
        elif params.grammar is not None and gate is not None:
            params = replace(params, grammar_gate=self._in_tokens(gate))
        params = replace(params, keep_special=self._kept(marks))
        return OutputPlan(params, self, prompt, tools, separate_reasoning, stops)

    def with_thinking_budget(self, params: SamplingParams, prompt: str) -> SamplingParams:
        """Return ``params`` with the span of the reasoning that ``thinking_budget`` limits, for an output that follows
        ``prompt``. ``plan`` does the same for chats. Raises ``RequestError`` if the model has no reasoning parser."""
        if params.thinking_budget is None or params.thinking_span is not None:
            return params
        return self._budgeted(params, self.reasoning.gate(prompt) if self.reasoning else None)

    def _budgeted(self, params: SamplingParams, gate: ConstraintGate | None) -> SamplingParams:
        if params.thinking_budget is None:
            return params
        if self.reasoning is None:
            raise RequestError(
                "thinking_budget needs a reasoning parser, and this server has none for its model; start it with "
                "reasoning_parser: name (`dovetail explain` shows which there are), or leave thinking_budget out",
                param="thinking_budget",
                code="unsupported_parameter",
            )
        if gate is None or not gate.until:  # the model does not reason in this output
            return replace(params, thinking_budget=None)
        until = self._tokenizer.token_to_id(gate.until)
        if until is None:
            raise RequestError(
                f"the reasoning of this model ends with {gate.until!r}, which is not one token of it, so its length "
                "cannot be limited; leave thinking_budget out",
                param="thinking_budget",
                code="unsupported_parameter",
            )
        lead = self._encoded(gate.lead or self.reasoning.opening)
        return replace(params, thinking_span=ThinkingSpan(lead, until, begun=not gate.lead))

    def _tool_parser(self) -> ToolParser:
        if self.tool is None:
            raise RequestError(
                "this server has no tool parser for its model, so it cannot distinguish calls from text; start it with "
                "tool_parser: name (`dovetail explain` shows which there are), or give tool_choice: none",
                param="tools",
                code="unsupported_parameter",
            )
        return self.tool

    def _with_tools(
        self, params: SamplingParams, parser: ToolParser, tools: ToolRequest, reasoning: ConstraintGate | None
    ) -> SamplingParams:
        end = self._tokenizer.token_to_id(parser.call_end) if parser.call_end and not tools.parallel else None
        if end is not None:
            params = replace(params, stop_token_ids=(*params.stop_token_ids, end))
        if params.grammar is not None:
            raise RequestError(
                "tools and a constraint on the answer (response_format, or another) cannot both hold; for an answer "
                "give tool_choice: none",
                param="tools",
            )
        constraint = parser.constraint(tools, self._offers)
        if constraint is None:
            return params
        gate = self._in_tokens(_joined(constraint, reasoning))
        return replace(params, grammar=constraint.grammar, grammar_gate=gate)

    def _in_tokens(self, gate: ConstraintGate) -> GrammarGate | None:
        """Return the gate in token ids; None for a gate that does nothing."""
        if gate == ConstraintGate():
            return None
        until = self._tokenizer.token_to_id(gate.until) if gate.until else None
        if gate.until and until is None:
            raise GrammarError(
                f"the constraint would begin after {gate.until!r}, which is not a token of this model, so its output "
                "cannot be constrained",
                keyword="until",
            )
        return GrammarGate(
            self._encoded(gate.lead),
            gate.optional,
            until,
            gate.may_end,
            self._encoded(gate.prefix),
            gate.prefix_in_grammar,
            tuple(self._stand_in(mark, char) for mark, char in gate.marks),
        )

    def _stand_in(self, mark: str, char: str) -> tuple[int, int]:
        """Return the token of a mark, and the token of ``char``, which represents the mark in the grammar. There must
        be exactly one token with that character."""
        token, code = self._tokenizer.token_to_id(mark), ord(char)
        holders = self._control_tokens.get(code, [])
        if token is None or len(holders) != 1 or self._tokenizer.bytes_of(holders[0]) != char.encode():
            raise GrammarError(
                f"this model's vocabulary has no single token for {mark!r}, or for the character U+{code:04X} that "
                "represents it in grammars, so calls in its format cannot be enforced; give tool_choice: auto and no "
                "strict functions",
                param="tools",
                keyword="marks",
            )
        return token, holders[0]

    @cached_property
    def _control_tokens(self) -> dict[int, list[int]]:
        """Return the tokens whose bytes contain a control character that may represent a mark, by that character."""
        found: dict[int, list[int]] = {code: [] for code in range(0x0E, 0x20)}
        for token in range(self._tokenizer.vocab_size):
            for code in found.keys() & set(self._tokenizer.bytes_of(token)):
                found[code].append(token)
        return found

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


def _joined(constraint: ToolConstraint, reasoning: ConstraintGate | None) -> ConstraintGate:
    """Return the gate of the constraint, preceded by the gate of the reasoning. Raises ``GrammarError`` if the two
    cannot be joined."""
    gate = constraint.gate
    if reasoning is None or constraint.covers_reasoning:
        return gate
    if gate.lead or gate.until:
        raise GrammarError(
            "strict tools with tool_choice 'auto' cannot be enforced here for a model that reasons first; drop "
            "strict, or set tool_choice to 'required'",
            param="tools",
            keyword="strict",
        )
    prefix = reasoning.prefix + gate.prefix
    return replace(reasoning, prefix=prefix, prefix_in_grammar=gate.prefix_in_grammar, marks=gate.marks)


def load_parsers(info: Mapping[str, Any], config: Config, tokenizer: Tokenizer, registry: Registry) -> OutputParsers:
    """Build the parsers that the engine has chosen. ``info`` is the engine's info (``EngineReady.info``). Raises
    ``PluginError``."""
    resolved = info["resolved"]
    names: list[str] = resolved.get("grammars") or []
    offers = [registry.get(ComponentKind.GRAMMAR, name).spec.offers for name in names]
    specials = frozenset(tokenizer.bytes_of(i).decode("utf-8", "replace") for i in tokenizer.special_token_ids)
    context = ParserContext(tokenizer.tool_template, specials)

    def built(kind: ComponentKind) -> Any:
        return next((chosen.build(context) for chosen in reported(resolved, kind, config, registry)), None)

    def named(kind: ComponentKind, name: str) -> Any:
        component = registry.get(kind, name)
        settings = registry.config_class(kind, component.spec.name)(kind=component.spec.name)
        return Chosen(component, settings).build(context)

    return OutputParsers(
        tokenizer,
        built(ComponentKind.TOOL_PARSER),
        built(ComponentKind.REASONING_PARSER),
        frozenset().union(*offers),
        named,
    )

"""Provide the conformance suites of tool parsers and reasoning parsers, which feed texts in any pieces."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dovetail.errors import GrammarError
from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import (
    ParserContext,
    ReasoningParser,
    ReasoningStream,
    Tool,
    ToolConstraint,
    ToolParser,
    ToolRequest,
    ToolStream,
)
from dovetail.registry.specs import ComponentKind
from dovetail.sampling_params import GrammarKind
from dovetail.testing import enforced
from dovetail.testing.component import ComponentSuite
from dovetail.testing.grammar_cases import FEATURES

SENTINEL = "zqxzqx"
"""A word that no generated text contains."""

OPEN: dict[str, Any] = {"type": "object"}
TOOLS = (Tool("get_weather", OPEN), Tool("add", OPEN), Tool("get", OPEN), Tool("find_user_by_name", OPEN))

_scalars = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | st.text(max_size=12)
_values = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_keys = st.text(string.ascii_lowercase + "_", min_size=1, max_size=8).filter(lambda key: key not in ("in", "is", "if"))
words = st.text(string.ascii_letters + " .,é漢🙂\n", max_size=40).map(str.strip)


class ExpectedCall(NamedTuple):
    """Describe a call with its arguments as a value."""

    name: str
    arguments: dict[str, Any]


calls = st.lists(
    st.builds(
        ExpectedCall,
        st.sampled_from([tool.name for tool in TOOLS]),
        st.dictionaries(_keys, _values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)


class ParsedOutput(NamedTuple):
    """Hold everything that a tool stream has emitted: content, and (name, text of the arguments) of each call."""

    content: str
    calls: tuple[tuple[str, str], ...]

    @property
    def values(self) -> list[ExpectedCall]:
        """Return the calls with their arguments parsed."""
        return [ExpectedCall(name, json.loads(arguments)) for name, arguments in self.calls]


def run_stream(stream: ToolStream, pieces: Sequence[str]) -> ParsedOutput:
    """Run ``pieces`` through ``stream``, check the form of its deltas, and return what they add up to."""
    content = ""
    found: list[list[str]] = []
    ids: list[str] = []
    for delta in [*map(stream.feed, pieces), stream.finish()]:
        content += delta.content
        for call in delta.calls:
            if call.index == len(found):
                assert call.id, f"call {call.index} begins without an id"
                assert call.name, f"call {call.index} begins without a name"
                ids.append(call.id)
                found.append([call.name, ""])
            assert call.index == len(found) - 1, f"a part of call {call.index} after call {len(found) - 1} began"
            if found[call.index][1]:
                assert call.id is None, "only the first part of a call has its id"
                assert call.name is None, "only the first part of a call has its name"
            found[call.index][1] += call.arguments
    assert len(set(ids)) == len(ids), f"ids are not unique: {ids}"
    return ParsedOutput(content, tuple((name, arguments) for name, arguments in found))


def cut(text: str, places: Sequence[int]) -> list[str]:
    """Return ``text`` in pieces, cut at ``places``; pieces may be empty."""
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


places = st.lists(st.integers(0, 10_000), max_size=12)


@st.composite
def damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """Draw a valid text, or one that is damaged: cut short, or with holes, doubled parts or foreign parts."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, 3))):
        a, b = sorted(draw(st.integers(0, len(text))) for _ in range(2))
        part = text[a : min(b, a + 40)]
        kind = draw(st.sampled_from(["hole", "short", "double", "foreign"]))
        if kind == "hole":
            text = text[:a] + text[a + len(part) :]
        elif kind == "short":
            text = text[:b]
        elif kind == "double":
            text = text[:b] + part + text[b:]
        else:
            text = text[:a] + draw(st.text('{}[]"\\:,<|> \nabc019-', max_size=6)) + text[a:]
    return text


class PropertySuite(ComponentSuite):
    """Provide the base of both suites."""

    max_examples: ClassVar[int] = 50
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    def check(self, test: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
        """Test a property. Inherited methods with ``@given`` would share their examples and failures, so it is applied here."""
        quiet = settings(
            max_examples=self.max_examples,
            phases=self.phases,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        )
        quiet(given(**strategies)(test))()


class ToolParserSuite(PropertySuite):
    """Test a tool parser.

    A subclass sets ``name`` and implements ``write``, which writes outputs as the model does. It sets ``mixed = False`` if the format
    has no text around calls, ``most_calls = 1`` if an output has at most one call, and ``in_fragments = False`` if the parser emits
    whole calls.
    """

    kind: ClassVar[ComponentKind] = ComponentKind.TOOL_PARSER
    context: ClassVar[ParserContext] = ParserContext()
    mixed: ClassVar[bool] = True
    most_calls: ClassVar[int] = 3
    in_fragments: ClassVar[bool] = True

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        """Return an output in this format: ``content``, which may be empty, and then the calls."""
        raise NotImplementedError

    def make(self) -> ToolParser:
        """Return a new parser. A subclass may override this to test a class that no plugin registers."""
        return self.build(self.context)

    def parse(self, *pieces: str) -> ParsedOutput:
        """Return what the parser emits for a text in these pieces."""
        return run_stream(self.make().stream(TOOLS), pieces)

    def texts(self) -> st.SearchStrategy[str]:
        """Return a strategy of valid texts."""
        return st.builds(lambda content, made: self.write(*self._fit(content, made)), words, calls)

    def _fit(self, content: str, made: list[ExpectedCall]) -> tuple[str, list[ExpectedCall]]:
        return content if self.mixed else "", made[: self.most_calls]

    def test_calls_are_found_in_any_pieces(self) -> None:
        """Content and calls are those that were written, regardless of how the text is divided into pieces."""

        def test(content: str, made: list[ExpectedCall], at: list[int]) -> None:
            content, made = self._fit(content, made)
            parsed = self.parse(*cut(self.write(content, made), at))
            assert parsed.content.strip() == content
            assert parsed.values == made

        self.check(test, content=words, made=calls, at=places)

    def test_pieces_do_not_matter(self) -> None:
        """The content and the calls of a text, damaged or not, are the same in any pieces, and one character at a time."""

        def test(text: str, at: list[int]) -> None:
            whole = self.parse(text)
            assert self.parse(*cut(text, at)) == whole
            assert self.parse(*text) == whole

        self.check(test, text=damaged(self.texts()), at=places)

    def test_text_without_calls_is_unchanged(self) -> None:
        """If a text contains no call, all of it is content, to the last character."""

        def test(text: str) -> None:
            parsed = self.parse(text)
            assert parsed.calls or parsed.content == text

        self.check(test, text=damaged(self.texts()) | st.text())

    def test_no_word_is_lost(self) -> None:
        """A word inserted anywhere is found in the content, or in the name or arguments of a call."""

        def test(text: str, at: int) -> None:
            at %= len(text) + 1
            parsed = self.parse(text[:at] + SENTINEL + text[at:])
            shown = [parsed.content, *(part for call in parsed.calls for part in call)]
            assert sum(part.count(letter) for part in shown for letter in "zqx") >= len(SENTINEL)

        self.check(test, text=damaged(self.texts()), at=st.integers(0, 10_000))

    def test_emitted_deltas_stay(self) -> None:
        """What the parser emits for the beginning of a text is the beginning of what it emits for the whole text."""

        def test(text: str, at: int) -> None:
            at %= len(text) + 1
            stream = self.make().stream(TOOLS)
            early, late = stream.feed(text[:at]), self.parse(text)
            assert late.content.startswith(early.content)
            for call in early.calls:
                name, arguments = late.calls[call.index]
                assert call.name in (None, name)
                assert arguments.startswith(call.arguments)

        self.check(test, text=damaged(self.texts()), at=st.integers(0, 10_000))

    def test_arguments_come_as_they_grow(self) -> None:
        """A long argument is emitted in parts, before the call has ended."""
        if not self.in_fragments:
            pytest.skip(f"{self.name} emits whole calls")
        text = self.write("", [ExpectedCall("get_weather", {"first": "a", "second": "b" * 200})])
        stream = self.make().stream(TOOLS)
        early = [stream.feed(char) for char in text[: text.index("b" * 100)]]
        assert any(call.name == "get_weather" for delta in early for call in delta.calls)

    def test_unknown_functions_are_content(self) -> None:
        """A function that was not offered is not called."""
        text = self.write("", [ExpectedCall("launch_rocket", {"to": "moon"})])
        assert self.parse(text) == ParsedOutput(text, ())

    @pytest.mark.parametrize("mode", enforced.REQUESTS)
    def test_what_is_enforced_is_what_was_requested(self, mode: str) -> None:
        """``constraint`` returns a constraint that a grammar backend compiles, or a ``GrammarError``. If a call is
        required, every random text under the constraint has calls of the requested functions only, with arguments that
        their schemas allow, one call unless several are allowed, and every function can be called."""
        request = enforced.REQUESTS[mode]
        for offers, backend in enforced.grammar_backends():
            try:
                constraint = self.make().constraint(request, offers)
            except GrammarError:
                continue  # it says what it cannot enforce
            assert isinstance(constraint, ToolConstraint), f"{constraint!r:.80} enforces nothing; a request needs it"
            feature = FEATURES[constraint.grammar.kind]
            assert feature in offers, f"its constraint needs {feature}, which the grammar backend does not offer"
            if not request.required:
                backend.compile(constraint.grammar)
                continue
            call = ExpectedCall(request.tools[0].name, {key: a[0] for key, a in enforced.VALUES["get_weather"].items()})
            marks = [*self.make().special_tokens, self.write("", [call]).strip()]
            texts = enforced.written_outputs(constraint, backend, marks, 16, seed=len(mode))
            assert texts, "no text under the constraint ends"
            found = [self._enforced_calls(text, request) for text in texts]
            missing = {tool.name for tool in request.tools} - {name for names in found for name in names}
            assert not missing, f"no text under the constraint calls {', '.join(sorted(missing))}"

    def _enforced_calls(self, text: str, request: ToolRequest) -> list[str]:
        """Check the calls of a text that was written under the constraint of ``request``, and return their names. An
        output that may have only one call stops at a special token that ends it."""
        end = self.make().call_end
        if not request.parallel and end and end in self.make().special_tokens and end in text:
            text = text[: text.index(end) + len(end)]
        parsed = run_stream(self.make().stream(request.tools), [text])
        assert parsed.calls, f"a call is required, and the constraint allows {text!r}"
        assert request.parallel or len(parsed.calls) == 1, f"one call is allowed, and the constraint allows {text!r}"
        for name, arguments in parsed.calls:
            assert name in {tool.name for tool in request.tools}, f"the constraint allows a call of {name}: {text!r}"
            assert enforced.is_valid(name, _json(arguments)), f"the schema forbids what the constraint allows: {text!r}"
        return [name for name, _ in parsed.calls]

    def test_nothing_is_enforced_that_was_not_requested(self) -> None:
        """``constraint`` returns None if no call is required and no function is strict, whatever the grammar backends
        offer."""
        for offers in (frozenset[Feature](), *(offers for offers, _ in enforced.grammar_backends())):
            for parallel in (True, False):
                request = ToolRequest(enforced.LOOSE, parallel=parallel)
                assert self.make().constraint(request, offers) is None, "outputs without calls are constrained"

    @pytest.mark.parametrize("mode", enforced.REQUESTS)
    def test_what_cannot_be_enforced_is_refused(self, mode: str) -> None:
        """With a grammar backend that offers JSON schemas only, ``constraint`` needs no more than that, or raises a
        ``GrammarError``."""
        try:
            constraint = self.make().constraint(enforced.REQUESTS[mode], frozenset({Feature.GRAMMAR_JSON_SCHEMA}))
        except GrammarError:
            return
        assert isinstance(constraint, ToolConstraint), f"{constraint!r:.80} enforces nothing; a request needs it"
        assert constraint.grammar.kind == GrammarKind.JSON_SCHEMA, (
            f"it needs a grammar of kind {constraint.grammar.kind}"
        )


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None


class ReasoningParserSuite(PropertySuite):
    """Test a reasoning parser. A subclass sets ``name`` and implements ``write``, which writes outputs as the model does."""

    kind: ClassVar[ComponentKind] = ComponentKind.REASONING_PARSER
    context: ClassVar[ParserContext] = ParserContext()
    prompts: ClassVar[Sequence[str]] = ("Hello",)
    """The ends of prompts after which the model writes outputs as ``write`` does."""

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        """Return an output that follows ``prompt``; neither part is empty."""
        raise NotImplementedError

    def make(self) -> ReasoningParser:
        """Return a new parser. A subclass may override this to test a class that no plugin registers."""
        return self.build(self.context)

    def parse(self, prompt: str, *pieces: str) -> tuple[str, str]:
        """Return the reasoning and the answer that the parser finds in a text in these pieces."""
        stream: ReasoningStream = self.make().stream(prompt)
        deltas = [*map(stream.feed, pieces), stream.finish()]
        return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)

    def texts(self, prompt: str) -> st.SearchStrategy[str]:
        """Return a strategy of valid texts that follow ``prompt``."""
        return st.builds(lambda a, b: self.write(a or "x", b or "y", prompt), words, words)

    def test_both_parts_are_found_in_any_pieces(self) -> None:
        """Reasoning and answer are those that were written, regardless of how the text is divided into pieces."""
        for prompt in self.prompts:

            def test(reasoning: str, answer: str, at: list[int], prompt: str) -> None:
                text = self.write(reasoning or "x", answer or "y", prompt)
                found = self.parse(prompt, *cut(text, at))
                assert [part.strip() for part in found] == [reasoning or "x", answer or "y"]

            self.check(test, prompt=st.just(prompt), reasoning=words, answer=words, at=places)

    def test_pieces_do_not_matter(self) -> None:
        """The reasoning and the answer of a text, damaged or not, are the same in any pieces, and one character at a time."""
        for prompt in self.prompts:

            def test(text: str, at: list[int], prompt: str) -> None:
                whole = self.parse(prompt, text)
                assert self.parse(prompt, *cut(text, at)) == whole
                assert self.parse(prompt, *text) == whole

            self.check(test, prompt=st.just(prompt), text=damaged(self.texts(prompt)), at=places)

    def test_no_word_is_lost(self) -> None:
        """A word inserted anywhere is found in the reasoning or in the answer."""
        for prompt in self.prompts:

            def test(text: str, at: int, prompt: str) -> None:
                at %= len(text) + 1
                found = "".join(self.parse(prompt, text[:at] + SENTINEL + text[at:]))
                assert SENTINEL in found

            self.check(test, prompt=st.just(prompt), text=damaged(self.texts(prompt)), at=st.integers(0, 10_000))

    def test_both_parts_come_as_they_grow(self) -> None:
        """A long text is emitted in parts before it has ended, because the client waits for it."""
        for prompt in self.prompts:
            text = self.write("x" * 200 + "\n" + "y" * 200, "z" * 400, prompt)
            stream = self.make().stream(prompt)
            deltas = [stream.feed(char) for char in text]
            emitted = [sum(map(len, parts)) for parts in zip(*deltas, strict=True)]
            assert min(emitted) >= 200, (
                f"of 400 characters of reasoning and answer, {emitted} were emitted before the end"
            )

    def test_a_gate_ends_with_what_it_writes(self) -> None:
        """If a constraint on the answer begins after the reasoning, the output contains the mark at which it begins."""
        for prompt in self.prompts:
            gate = self.make().gate(prompt)
            if gate is not None:
                text = self.write("x", "y", prompt)
                assert gate.until
                assert gate.until in text
                assert gate.optional or text.startswith(gate.lead)
                assert text.partition(gate.until)[2].strip().startswith(gate.prefix)

"""Conformance suites of tool parsers and reasoning parsers: their contract, over texts in any pieces."""

from __future__ import annotations

import itertools
import json
import string
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dovetail.interfaces.parsers import ParserContext, ReasoningParser, ReasoningStream, Tool, ToolParser, ToolStream
from dovetail.registry.specs import ComponentKind
from dovetail.testing.component import ComponentSuite

SENTINEL = "zqxzqx"
"""A word that no text has by itself."""

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
    """A call, its arguments as a value."""

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
    """All that a tool stream told: content, and (name, text of the arguments) of each call."""

    content: str
    calls: tuple[tuple[str, str], ...]

    @property
    def values(self) -> list[ExpectedCall]:
        """The calls, their arguments read."""
        return [ExpectedCall(name, json.loads(arguments)) for name, arguments in self.calls]


def run_stream(stream: ToolStream, pieces: Sequence[str]) -> ParsedOutput:
    """Run ``pieces`` through ``stream`` and hold its deltas to the rules of their form."""
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
    """``text`` in pieces, cut at ``places``, empty pieces among them."""
    at = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(at)]


places = st.lists(st.integers(0, 10_000), max_size=12)


@st.composite
def damaged(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> str:
    """A valid text, or what is left of it: cut short, holes, doubled or foreign parts."""
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
    """Base of both suites."""

    max_examples: ClassVar[int] = 50
    phases: ClassVar[Sequence[Phase]] = tuple(Phase)

    def check(self, test: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
        """Run a property. (``@given`` methods that are inherited would share their examples and failures.)"""
        quiet = settings(
            max_examples=self.max_examples,
            phases=self.phases,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        )
        quiet(given(**strategies)(test))()


class ToolParserSuite(PropertySuite):
    """A subclass sets ``name`` and says how a model writes: ``write``. Formats that have no text beside calls set
    ``mixed = False``; those of whose outputs no more than one call comes set ``most_calls = 1``; parsers that tell calls whole set
    ``in_fragments = False``."""

    kind: ClassVar[ComponentKind] = ComponentKind.TOOL_PARSER
    context: ClassVar[ParserContext] = ParserContext()
    mixed: ClassVar[bool] = True
    most_calls: ClassVar[int] = 3
    in_fragments: ClassVar[bool] = True

    def write(self, content: str, calls: Sequence[ExpectedCall]) -> str:
        """An output of the model, as this format has it: ``content``, perhaps empty, then the calls."""
        raise NotImplementedError

    def make(self) -> ToolParser:
        """A new parser. Override it to test a class that no plugin registers."""
        return self.build(self.context)

    def parse(self, *pieces: str) -> ParsedOutput:
        """What the parser makes of a text."""
        return run_stream(self.make().stream(TOOLS), pieces)

    def texts(self) -> st.SearchStrategy[str]:
        """Valid texts."""
        return st.builds(lambda content, made: self.write(*self._fit(content, made)), words, calls)

    def _fit(self, content: str, made: list[ExpectedCall]) -> tuple[str, list[ExpectedCall]]:
        return content if self.mixed else "", made[: self.most_calls]

    def test_calls_are_found_in_any_pieces(self) -> None:
        """Content and calls are those that were written, however the text is cut."""

        def test(content: str, made: list[ExpectedCall], at: list[int]) -> None:
            content, made = self._fit(content, made)
            parsed = self.parse(*cut(self.write(content, made), at))
            assert parsed.content.strip() == content
            assert parsed.values == made

        self.check(test, content=words, made=calls, at=places)

    def test_pieces_do_not_matter(self) -> None:
        """Damaged texts too: the same content and calls in any pieces, and a character at a time."""

        def test(text: str, at: list[int]) -> None:
            whole = self.parse(text)
            assert self.parse(*cut(text, at)) == whole
            assert self.parse(*text) == whole

        self.check(test, text=damaged(self.texts()), at=places)

    def test_text_without_calls_is_unchanged(self) -> None:
        """Where no call comes of it, the text is the content, to the last character."""

        def test(text: str) -> None:
            parsed = self.parse(text)
            assert parsed.calls or parsed.content == text

        self.check(test, text=damaged(self.texts()) | st.text())

    def test_no_word_is_lost(self) -> None:
        """A word put anywhere is in the content, or in a call's name or arguments."""

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
            pytest.skip(f"{self.name} tells calls whole")
        text = self.write("", [ExpectedCall("get_weather", {"first": "a", "second": "b" * 200})])
        stream = self.make().stream(TOOLS)
        early = [stream.feed(char) for char in text[: text.index("b" * 100)]]
        assert any(call.name == "get_weather" for delta in early for call in delta.calls)

    def test_unknown_functions_are_content(self) -> None:
        """A function that was not offered is not called."""
        text = self.write("", [ExpectedCall("launch_rocket", {"to": "moon"})])
        assert self.parse(text) == ParsedOutput(text, ())


class ReasoningParserSuite(PropertySuite):
    """A subclass sets ``name`` and says how a model writes: ``write``."""

    kind: ClassVar[ComponentKind] = ComponentKind.REASONING_PARSER
    context: ClassVar[ParserContext] = ParserContext()
    prompts: ClassVar[Sequence[str]] = ("Hello",)
    """Ends of prompts, after each of which a model writes so."""

    def write(self, reasoning: str, answer: str, prompt: str) -> str:
        """An output that follows ``prompt``; neither part is empty."""
        raise NotImplementedError

    def make(self) -> ReasoningParser:
        """A new parser. Override it to test a class that no plugin registers."""
        return self.build(self.context)

    def parse(self, prompt: str, *pieces: str) -> tuple[str, str]:
        """Reasoning and answer that the parser finds."""
        stream: ReasoningStream = self.make().stream(prompt)
        deltas = [*map(stream.feed, pieces), stream.finish()]
        return "".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)

    def texts(self, prompt: str) -> st.SearchStrategy[str]:
        """Valid texts."""
        return st.builds(lambda a, b: self.write(a or "x", b or "y", prompt), words, words)

    def test_both_parts_are_found_in_any_pieces(self) -> None:
        """Reasoning and answer are those that were written, however the text is cut."""
        for prompt in self.prompts:

            def test(reasoning: str, answer: str, at: list[int], prompt: str) -> None:
                text = self.write(reasoning or "x", answer or "y", prompt)
                found = self.parse(prompt, *cut(text, at))
                assert [part.strip() for part in found] == [reasoning or "x", answer or "y"]

            self.check(test, prompt=st.just(prompt), reasoning=words, answer=words, at=places)

    def test_pieces_do_not_matter(self) -> None:
        """Damaged texts too."""
        for prompt in self.prompts:

            def test(text: str, at: list[int], prompt: str) -> None:
                whole = self.parse(prompt, text)
                assert self.parse(prompt, *cut(text, at)) == whole
                assert self.parse(prompt, *text) == whole

            self.check(test, prompt=st.just(prompt), text=damaged(self.texts(prompt)), at=places)

    def test_no_word_is_lost(self) -> None:
        """A word put anywhere is in one of the parts."""
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
            told = [sum(map(len, parts)) for parts in zip(*deltas, strict=True)]
            assert min(told) >= 200, f"of 400 characters of reasoning and answer, {told} were told before the end"

    def test_a_gate_ends_with_what_it_writes(self) -> None:
        """Where a constraint on the answer has to wait, there is a mark to wait for."""
        for prompt in self.prompts:
            gate = self.make().gate(prompt)
            if gate is not None:
                text = self.write("x", "y", prompt)
                assert gate.until
                assert gate.until in text
                assert gate.optional or text.startswith(gate.lead)
                assert text.partition(gate.until)[2].strip().startswith(gate.prefix)

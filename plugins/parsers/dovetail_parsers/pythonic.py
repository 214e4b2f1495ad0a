"""Read answers that are a list of Python calls, ``[name(argument="value"), ...]``."""

from __future__ import annotations

import ast
import json
import string
import warnings
from collections.abc import Callable, Sequence

from pydantic import BaseModel

from dovetail.interfaces.features import Feature
from dovetail.interfaces.parsers import ParserContext, Tool, ToolConstraint, ToolParser, ToolRequest, ToolStream
from dovetail.sampling_params import GrammarKind, GrammarSpec
from dovetail_parsers.calls import CallReader
from dovetail_parsers.python_grammar import call_grammar
from dovetail_parsers.reader import END, MalformedError, Reading
from dovetail_parsers.schemas import enforced_tools, must_enforce, require_feature

BEGIN, CLOSE = "<|python_start|>", "<|python_end|>"
_IN_NAME = frozenset(string.ascii_letters + string.digits + "_.-")
_WORDS = {"true": True, "false": False, "null": None}
_DEEPEST = 50


class _PythonicReader(CallReader):
    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str], marked: bool) -> None:
        self._mark = BEGIN if marked else None
        super().__init__(tools, new_id)

    def read(self) -> Reading[None]:
        """Read calls at the beginning of the output, and after the mark if the model has it."""
        if (yield from self.space()) == "[":
            yield from self.attempt(self._calls())
        else:
            self.give_back()
        while (yield from self.content_until(*([self._mark] if self._mark else []))) != END:
            yield from self.attempt(self._marked())

    def _marked(self) -> Reading[None]:
        yield from self.skip_space()
        yield from self.one_of("[")
        yield from self._calls()
        yield from self.close(CLOSE)

    def _calls(self) -> Reading[None]:
        """Read calls; the ``[`` has been read."""
        while True:
            yield from self.skip_space()
            yield from self._call()
            self.accept()
            yield from self.skip_space()
            if (yield from self.one_of(",]")) == "]":
                return

    def _call(self) -> Reading[None]:
        name = yield from self._word("(")
        if name not in self.names:
            raise MalformedError(f"there is no function {name!r}")
        before = "{"
        if (yield from self.space()) == ")":
            self.begin_call(name)
            self.add_arguments("{}")
            return
        self.unread()
        end = ","
        while end == ",":
            yield from self.skip_space()
            key = yield from self._word("=")
            value, end = yield from self._value()
            if before == "{":
                self.begin_call(name)
            self.add_arguments(f"{before}{json.dumps(key)}: {value}")
            before = ", "
        self.add_arguments("}")

    def _word(self, end: str) -> Reading[str]:
        """Read a name and the ``end`` after it, and return the name."""
        word = ""
        while (char := (yield from self.next())) != END and char in _IN_NAME:
            word += char
        if char != END:
            self.unread()
        yield from self.skip_space()
        yield from self.one_of(end)
        if not word:
            raise MalformedError("a name is missing")
        return word

    def _value(self) -> Reading[tuple[str, str]]:
        """Read a literal, and return it as JSON with the comma or parenthesis that follows it."""
        text, depth, quote, escaped = "", 0, "", False
        while True:
            char = yield from self.next()
            if char == END or (char == "#" and not quote):
                raise MalformedError("this is not a literal")
            if quote:
                quote = "" if char == quote and not escaped else quote
                escaped = char == "\\" and not escaped
            elif char in "\"'":
                quote = char
            elif depth == 0 and char in ",)":
                return as_json(text), char
            else:
                depth += (char in "([{") - (char in ")]}")
            text += char


def as_json(text: str) -> str:
    """Return a Python literal as JSON; ``true``, ``false`` and ``null`` are literals too. Raises ``MalformedError``."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes
            node = ast.parse(text.strip(), mode="eval").body
        return _json_of(node, _DEEPEST)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise MalformedError(f"{text!r} is not a literal: {error}") from error


def _json_of(node: ast.expr, depth: int) -> str:
    """Return the literal of ``node`` as JSON. Repeated keys are kept, because readers of JSON use the last one, as
    Python does."""
    match node:
        case _ if not depth:
            raise ValueError("it is nested too deep")
        case ast.Constant(value=str() | int() | float() | None as value):
            return _dumps(value)
        case ast.Name(id=word) if word in _WORDS:
            return _dumps(_WORDS[word])
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return _dumps(-value)
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return f"[{', '.join(_json_of(item, depth - 1) for item in items)}]"
        case ast.Dict(keys=keys, values=values):
            names = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
            if len(names) != len(keys):
                raise ValueError("keys are strings")
            parts = [_json_of(value, depth - 1) for value in values]
            return f"{{{', '.join(f'{_dumps(name)}: {part}' for name, part in zip(names, parts, strict=True))}}}"
    raise ValueError(f"it has a {type(node).__name__}")


def _dumps(value: object) -> str:
    plain = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return plain if plain.isprintable() else json.dumps(value)


class Pythonic(ToolParser):
    """Read and constrain calls in the format of Llama 3.2 and 4."""

    special_tokens = (BEGIN, CLOSE)

    def __init__(self, config: BaseModel, context: ParserContext) -> None:
        """See ``ToolParser``. If the mark is not a special token, it is read as text."""
        self._marked = BEGIN in context.special_tokens

    def stream(self, tools: Sequence[Tool]) -> ToolStream:
        """See ``ToolParser``."""
        return _PythonicReader(tools, self.new_id, self._marked)

    def constraint(self, request: ToolRequest, offers: frozenset[Feature]) -> ToolConstraint | None:
        """Constrain a list of calls in GBNF. If no call is required, a text that does not begin like a list is allowed
        too."""
        if not must_enforce(request):
            return None
        require_feature(
            "pythonic", offers, Feature.GRAMMAR_EBNF, "a call", "give tool_choice: auto and no strict functions"
        )
        text = call_grammar(enforced_tools(request), request.parallel, request.required)
        return ToolConstraint(GrammarSpec(GrammarKind.EBNF, text))

"""Write calls with Python literals as a GBNF grammar. Schemas with keywords that GBNF cannot express are refused."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from dovetail.errors import GrammarError
from dovetail.interfaces.parsers import Tool
from dovetail_parsers.python_literals import is_a, literal, quoted, repeat

_NOTES = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "$comment",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$id",
        "$defs",
        "definitions",
    ]
)
"""List the keywords that do not constrain a value."""
_OF_TYPE = {
    "string": frozenset({"minLength", "maxLength"}),
    "integer": frozenset[str](),
    "number": frozenset[str](),
    "boolean": frozenset[str](),
    "null": frozenset[str](),
    "array": frozenset({"items", "minItems", "maxItems"}),
    "object": frozenset({"properties", "required", "additionalProperties"}),
}
_ARGUMENT = re.compile(r"[A-Za-z0-9_.-]+")
_FORMS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (
        lambda v: isinstance(v, str) or (_is_list(v) and all(isinstance(part, str) for part in v)),
        "a type, or several",
    ),
    "properties": (lambda v: isinstance(v, Mapping) and all(map(_is_text, v)), "an object of schemas"),
    "required": (lambda v: isinstance(v, list) and all(map(_is_text, v)), "a list of names"),
    "enum": (lambda v: _is_list(v), "a list of values"),
    "anyOf": (lambda v: _is_list(v), "a list of schemas"),
    "$ref": (lambda v: isinstance(v, str), "'#', or '#/' and a path"),
}
"""Map each keyword to a check of its value and to a description of the allowed values."""
_MOST = 1000
_DEEPEST = 40
_MOST_RULES = 5000
"""Limit the number of rules to about the number that fits into the text of a constraint."""
_ANY_LEVELS = 3
_BASE = r"""
chars ::= [^"\\\x00-\x1f\x7f] | "\\" ["\\nrt]
string ::= "\"" chars* "\""
integer ::= "-"? ("0" | [1-9] [0-9]{0,17})
number ::= integer ("." [0-9]{1,15})?
boolean ::= "True" | "False"
null ::= "None"
scalar ::= string | number | boolean | null
word ::= [a-z_] [a-z0-9_]{0,30}
other ::= [ \t\r\n]* ([^ \t\r\n[] [^\x00]*)?
any0 ::= scalar
"""
_ANY = r"""
any{n} ::= scalar | "[" (any{m} (", " any{m})*)? "]" | "{{" (string ": " any{m} (", " string ": " any{m})*)? "}}"
"""


def call_grammar(tools: Sequence[Tool], parallel: bool, required: bool) -> str:
    """Return the grammar of a list of calls of ``tools``: one call unless ``parallel``. Unless ``required``, text that
    does not begin like a list is allowed too. Raises ``GrammarError`` for a keyword that cannot be translated."""
    rules = _Rules()
    calls = [f"{quoted(tool.name + '(')} {rules.arguments(tool)} {quoted(')')}" for tool in tools]
    rules.add("call", " | ".join(calls))
    more = ' (", " call)*' if parallel else ""
    rules.add("calls", f'"[" call{more} "]"')
    rules.add("root", "calls" if required else "calls | other")
    levels = [_ANY.format(n=n, m=n - 1).strip() for n in range(1, _ANY_LEVELS + 1)]
    return "\n".join([*rules.lines, _BASE.strip(), *levels, ""])


class _Rules:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self._tool = Tool("", {})
        self._path: list[str] = []  # the references that are being followed
        self._referenced: dict[str, str] = {}  # the rules of references that were followed

    def add(self, name: str, body: str) -> str:
        self.lines.append(f"{name} ::= {body}")
        return name

    def new(self, body: str) -> str:
        if len(self.lines) >= _MOST_RULES:
            raise self._refuse("size", f"more than {_MOST_RULES} rules")
        return self.add(f"r{len(self.lines)}", body)

    def arguments(self, tool: Tool) -> str:
        """Return the body for the arguments of a call, without the parentheses."""
        self._tool, self._path, self._referenced = tool, [], {}
        schema = {"type": "object", **tool.parameters}
        self._check_forms(schema)
        self._check(schema, {"type", *_OF_TYPE["object"]})
        for name in [*schema.get("properties", {}), *schema.get("required", ())]:
            if not _ARGUMENT.fullmatch(name):
                raise self._refuse("properties", f"{name!r:.80} cannot be the name of an argument")
        return self._members(schema, 0, lambda name: f"{name}=", "word", '"="')

    def value(self, schema: Any, depth: int) -> str:
        """Return a rule for the values that ``schema`` allows."""
        if depth > _DEEPEST:
            raise self._refuse("nesting", f"at most {_DEEPEST} levels")
        if schema is True or schema == {}:
            return f"any{_ANY_LEVELS}"
        if not isinstance(schema, Mapping):
            raise self._refuse("false", f"{schema!r:.80} is given as a schema, and allows no value")
        self._check_forms(schema)
        if "$ref" in schema:
            return self._reference(schema, depth)
        if "anyOf" in schema:
            self._check(schema, {"anyOf"})
            return self.new(" | ".join(self.value(option, depth + 1) for option in schema["anyOf"]))
        if "const" in schema or "enum" in schema:
            return self._choice(schema)
        types = self._types(schema)
        self._check(schema, {"type"}.union(*(_OF_TYPE[kind] for kind in types)))
        return self.new(" | ".join(self._typed(kind, schema, depth) for kind in types))

    def _types(self, schema: Mapping[str, Any]) -> list[str]:
        """Return the types that ``schema`` allows. Without ``type``, return the first type that one of its keywords
        constrains. This is valid because a grammar may allow fewer values than the schema."""
        if "type" not in schema:
            known = [kind for kind, keywords in _OF_TYPE.items() if keywords & schema.keys()]
            return known[:1] or list(_OF_TYPE)
        given = schema["type"]
        types = list(given) if isinstance(given, list) else [given]
        for kind in types:
            if kind not in _OF_TYPE:
                raise self._refuse("type", f"{kind!r:.80} is not a type")
        return types

    def _typed(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind == "string":
            return self._string(schema)
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            members = self._members(schema, depth, lambda name: f"{literal(name)}: ", "string", '": "')
            return f'"{{" {members} "}}"'
        return kind

    def _string(self, schema: Mapping[str, Any]) -> str:
        low, high = self._bounds(schema, "minLength", "maxLength")
        return "string" if (low, high) == (0, None) else rf'"\"" chars{repeat(low, high)} "\""'

    def _array(self, schema: Mapping[str, Any], depth: int) -> str:
        low, high = self._bounds(schema, "minItems", "maxItems")
        if high == 0:
            return '"[]"'
        item = self.value(schema.get("items", True), depth + 1)
        more = f'{item} (", " {item}){repeat(max(low - 1, 0), high if high is None else high - 1)}'
        return f'"[" {more if low else f"({more})?"} "]"'

    def _bounds(self, schema: Mapping[str, Any], low: str, high: str) -> tuple[int, int | None]:
        for keyword in (low, high):
            given = schema.get(keyword, 0)
            if not (isinstance(given, int) and 0 <= given <= _MOST):
                raise self._refuse(keyword, f"it is {given!r:.80}; allowed: 0 to {_MOST}")
        if schema.get(high, _MOST) < schema.get(low, 0):
            raise self._refuse(low, f"no value satisfies both {low} and {high}")
        return schema.get(low, 0), schema.get(high)

    def _members(self, schema: Mapping[str, Any], depth: int, key: Any, free: str, between: str) -> str:
        """Return an expression for the named members in their order, in which members that are not required may be left
        out. If no member is named, the expression matches any number of members with free names."""
        required = list(schema.get("required", ()))
        others = schema.get("additionalProperties", True)
        named: dict[str, Any] = {
            **schema.get("properties", {}),
            **{n: others for n in required if n not in schema.get("properties", {})},
        }
        if not named:
            if others is False:
                return '""'
            pair = f"{free} {between} {self.value(others, depth + 1)}"
            return f'({pair} (", " {pair})*)?'
        tails = ['""', '""']  # what may follow, built from the last member on: after no member, after at least one
        for name, part in reversed(named.items()):
            pair = f"{quoted(key(name))} {self.value(part, depth + 1)}"
            first, later = f"{pair} {tails[1]}", f'", " {pair} {tails[1]}'
            if name not in required:
                first, later = f"{first} | {tails[0]}", f"{later} | {tails[1]}"
            tails = [self.new(first), self.new(later)]
        return tails[0]

    def _choice(self, schema: Mapping[str, Any]) -> str:
        word = "const" if "const" in schema else "enum"
        self._check(schema, {word, "type"})
        values = [schema["const"]] if word == "const" else schema["enum"]
        types = self._types({"type": schema["type"]}) if "type" in schema else list(_OF_TYPE)
        allowed = [value for value in values if any(is_a(value, kind) for kind in types)]
        if not allowed:
            raise self._refuse(word, "no value is allowed")
        try:
            return self.new(" | ".join(quoted(literal(value)) for value in allowed))
        except (ValueError, UnicodeEncodeError) as error:
            raise self._refuse(word, str(error)) from None

    def _reference(self, schema: Mapping[str, Any], depth: int) -> str:
        self._check(schema, {"$ref"})
        ref = schema["$ref"]
        if ref in self._referenced:
            return self._referenced[ref]
        if ref in self._path:
            raise self._refuse("$ref", f"{ref!r:.80} refers to itself")
        target: Any = self._tool.parameters
        try:
            if ref != "#" and not ref.startswith("#/"):
                raise LookupError
            for part in ref.split("/")[1:]:
                target = target[part.replace("~1", "/").replace("~0", "~")]
        except (LookupError, TypeError, AttributeError):
            raise self._refuse("$ref", f"{ref!r:.80} is not a part of the schema") from None
        self._path.append(ref)
        made = self._referenced[ref] = self.value(target, depth + 1)
        self._path.pop()
        return made

    def _check_forms(self, schema: Mapping[str, Any]) -> None:
        for keyword in schema.keys() & _FORMS.keys():
            is_right, allowed = _FORMS[keyword]
            if not is_right(schema[keyword]):
                raise self._refuse(keyword, f"it is {schema[keyword]!r:.80}; allowed: {allowed}")

    def _check(self, schema: Mapping[str, Any], known: Iterable[str]) -> None:
        unknown = sorted(schema.keys() - set(known) - _NOTES)
        if unknown:
            raise self._refuse(
                unknown[0], f"together with {', '.join(sorted(schema.keys() & set(known))) or 'no other keyword'}"
            )

    def _refuse(self, keyword: str, why: str) -> GrammarError:
        return GrammarError(
            f"the parameters of function {self._tool.name!r} have {keyword!r} ({why}), which the tool "
            "format 'pythonic' (Python literals) cannot enforce; it can enforce types, enum, const, required, "
            "properties, items, anyOf, $ref without recursion, and limits of lengths. Drop the keyword, or give tool_choice: auto "
            "and no strict functions",
            param="tools",
            keyword=keyword,
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _is_text(value: Any) -> bool:
    """Return True if ``value`` is a text that can be written in UTF-8."""
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)

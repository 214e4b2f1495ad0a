"""Write the JSON texts of a rewritten schema (``schemas.rewrite``) as patterns that may call rules.

The texts follow conventions: properties come in the order of the schema, and keys that the schema does not name come
last; whitespace is allowed after opening brackets, commas and colons, and before closing brackets; every value that the
schema names has one spelling.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from dovetail_grammar import json_numbers
from dovetail_grammar.patterns import literal, whole, without_escapes
from dovetail_grammar.regex_parser import (  # fmt: skip
    EVERY,
    JSON_ESCAPED,
    Alt,
    Chars,
    Node,
    RegexSeq,
    Repeat,
    RuleCall,
    minus,
    parse,
    ranges_of,
    set_of,
)
from dovetail_grammar.schema_rules import SchemaRefusal, unsupported

_HEX = Chars(ranges_of([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)]))
_CODE = Alt(
    (  # \uXXXX that is not a surrogate, or a pair of surrogates
        RegexSeq((Chars(minus(_HEX.ranges, set_of("dD"))), *[_HEX] * 3)),
        RegexSeq((Chars(set_of("dD")), Chars(((0x30, 0x37),)), _HEX, _HEX)),
        RegexSeq((Chars(set_of("dD")), Chars(set_of("89abAB")), _HEX, _HEX, literal("\\u"), Chars(set_of("dD")), Chars(set_of("cdefCDEF")), _HEX, _HEX)),
    )
)  # fmt: skip
CHARACTER = Alt(
    (
        Chars(minus(EVERY, JSON_ESCAPED)),
        RegexSeq((literal("\\"), Alt((Chars(set_of('"\\/bfnrt')), RegexSeq((literal("u"), _CODE)))))),
    )
)
"""A character inside a JSON string."""
SHORT = Alt((Chars(minus(EVERY, JSON_ESCAPED)), RegexSeq((literal("\\"), Chars(set_of('"\\/bfnrt'))))))
"""A character inside a JSON string, without the \\uXXXX form, which takes half of the states of a regex that counts
characters."""
PLAIN = Chars(minus(EVERY, JSON_ESCAPED))
"""A character inside a JSON string that needs no escape."""

_KNOWN = {
    "string": {"minLength", "maxLength", "pattern"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"},
    "integer": {"minimum", "maximum", "multipleOf"},
    "array": {"prefixItems", "items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"},
    "boolean": set[str](),
    "null": set[str](),
}


class JsonTermWriter:
    """Write the terms of one document. Rules are added to ``rules`` as they are needed.

    ``whitespace`` is the maximum number of whitespace characters in one place; None is without bound. ``depth`` is the
    maximum number of levels of arrays and objects in a value that the schema leaves open; schemas that need recursive
    rules are then refused. If ``depth`` is None, rules may be recursive and there is no bound.
    """

    def __init__(self, schema: Mapping[str, Any], whitespace: int | None, depth: int | None) -> None:
        self._defs: Mapping[str, Any] = schema.get("$defs", {})
        self._depth = depth
        self._space = Repeat(Chars(set_of(" \t\n\r")), 0, whitespace)
        self.rules: dict[str, Node] = {}
        self._open: set[str] = set()

    def value(self, schema: Any) -> Node:
        """Return the pattern of any rewritten schema; None allows nothing."""
        if schema is None or schema is False:
            return Alt(())
        s = {} if schema is True else {key: value for key, value in schema.items() if key != "$defs"}
        if "$ref" in s:
            return self._reference(s["$ref"].removeprefix("#/$defs/"))
        if "anyOf" in s:
            return Alt(tuple(map(self.value, s["anyOf"])))
        if "enum" in s:
            return Alt(tuple(map(self._constant, s["enum"])))
        return self._of_type(s) if s else self._anything(self._depth)

    def _reference(self, name: str) -> Node:
        if name in self._open and self._depth is not None:
            raise SchemaRefusal("#", "a schema that refers to itself is not supported by this grammar backend", "$ref")
        if name not in self.rules:
            self.rules[name] = Alt(())
            self._open.add(name)
            self.rules[name] = self.value(self._defs[name])
            self._open.remove(name)
        return RuleCall(name)

    def _of_type(self, s: dict[str, Any]) -> Node:
        name = s["type"]
        for keyword in s.keys() - _KNOWN[name] - {"type"}:
            raise unsupported(f"#/.../{keyword}", keyword)
        if name in ("boolean", "null"):
            return Alt((literal("true"), literal("false"))) if name == "boolean" else literal("null")
        write = {"string": self._string, "number": self._number, "integer": self._integer, "array": self._array, "object": self._object}  # fmt: skip
        return write[name](s)

    # -- scalars ---------------------------------------------------------------------------------------------------------

    def _constant(self, value: Any) -> Node:
        if isinstance(value, list):
            return self._listed(map(self._constant, value), "[]")
        if isinstance(value, dict):
            return self._listed((self._member(key, self._constant(item)) for key, item in value.items()), "{}")
        return literal(_spelled(value))

    def _listed(self, parts: Iterable[Node], brackets: str) -> Node:
        items = [item for part in parts for item in (self._comma, part)][1:]
        return self._bracketed(RegexSeq(tuple(items)), brackets)

    def _string(self, s: dict[str, Any]) -> Node:
        if "pattern" in s:
            return _quoted(_pattern(s["pattern"]))
        counted = self._depth is not None and ("minLength" in s or "maxLength" in s)
        return _quoted(Repeat(SHORT if counted else CHARACTER, s.get("minLength", 0), s.get("maxLength")))

    def _number(self, s: dict[str, Any]) -> Node:
        bounds = [s.get("minimum", s.get("exclusiveMinimum")), s.get("maximum", s.get("exclusiveMaximum"))]
        low, high = (None if bound is None else Fraction(repr(bound)) for bound in bounds)
        above, below = "exclusiveMinimum" in s, "exclusiveMaximum" in s
        return json_numbers.number(low, high, above=above, below=below)

    def _integer(self, s: dict[str, Any]) -> Node:
        if "multipleOf" in s:
            return self._multiples(s["multipleOf"])
        return json_numbers.integer(s.get("minimum"), s.get("maximum"))

    def _multiples(self, step: int) -> Node:
        """Return the pattern of the multiples of ``step``, with a rule for each remainder of the digits that were read."""
        if self._depth is not None:
            raise unsupported("#", "multipleOf", f"it is {step}, without bounds")
        names = [f"multiple of {step}, {rest}" for rest in range(step)]

        def digits(rest: int, first: int) -> tuple[Node, ...]:
            return tuple(
                RegexSeq((literal(str(digit)), RuleCall(names[(10 * rest + digit) % step])))
                for digit in range(first, 10)
            )

        for rest, name in enumerate(names):
            self.rules[name] = Alt((*digits(rest, 0), *([RegexSeq(())] if rest == 0 else [])))
        return RegexSeq((Repeat(literal("-"), 0, 1), Alt((literal("0"), *digits(0, 1)))))

    # -- arrays and objects ----------------------------------------------------------------------------------------------

    @property
    def _comma(self) -> Node:
        return RegexSeq((literal(","), self._space))

    def _bracketed(self, inside: Node, brackets: str) -> Node:
        return RegexSeq((literal(brackets[0]), self._space, inside, literal(brackets[1])))

    def _array(self, s: dict[str, Any]) -> Node:
        low, high = s.get("minItems", 0), s.get("maxItems")
        prefix = [self.value(item) for item in s.get("prefixItems", ())]
        item = self.value(s.get("items", True))
        if prefix:
            most = None if high is None else high - len(prefix)
            filled: Node = Repeat(RegexSeq((self._comma, item)), max(low - len(prefix), 0), most)
            for index in reversed(range(1, len(prefix))):
                filled = Repeat(RegexSeq((self._comma, prefix[index], filled)), 1 if index < low else 0, 1)
            filled = RegexSeq((prefix[0], filled))
        else:
            filled = self._repeated(item, low, high)
        return self._bracketed(Repeat(RegexSeq((filled, self._space)), 1 if low else 0, 1), "[]")

    def _repeated(self, item: Node, low: int, high: int | None) -> Node:
        """Return the pattern of one item or more.

        The comma follows every item except the last one. An item is then at one position of the automaton, no matter
        whether other items precede it.
        """
        if high == 0:
            return Alt(())
        return RegexSeq(
            (Repeat(RegexSeq((item, self._comma)), max(low - 1, 0), None if high is None else high - 1), item)
        )

    def _member(self, name: str, value: Node) -> Node:
        return RegexSeq((literal(f"{_spelled(name)}:"), self._space, value))

    def _object(self, s: dict[str, Any]) -> Node:
        required = set(s.get("required", ()))
        members = [(self._member(name, self.value(value)), name in required) for name, value in s["properties"].items()]
        other = self._other_member(s)
        low, high = s.get("minProperties", 0), s.get("maxProperties")
        if low > len(required) or high is not None or (self._depth is None and not required):
            inside = self._counted(members, other, max(low, 1), high)
        else:
            inside = self._joined(members, other)
        empty = not required and low == 0
        filled = RegexSeq((inside, self._space))
        return self._bracketed(Repeat(filled, 0, 1) if empty else filled, "{}")

    def _other_member(self, s: dict[str, Any]) -> Node | None:
        """Return the pattern of a member whose key the schema does not name, or None if there can be none."""
        keys = {pattern: _quoted(_pattern(pattern)) for pattern in s.get("patternProperties", {})}
        options = [self._keyed(key, s["patternProperties"][pattern]) for pattern, key in keys.items()]
        if s.get("additionalProperties", False) is not False:
            options.append(self._keyed(_quoted(Repeat(CHARACTER, 0, None)), s["additionalProperties"]))
        return Alt(tuple(options)) if options else None

    def _keyed(self, key: Node, value: Any) -> Node:
        return RegexSeq((key, literal(":"), self._space, self.value(value)))

    def _joined(self, members: list[tuple[Node, bool]], other: Node | None) -> Node:
        """Return the pattern of one member or more.

        The comma follows each member before the last required one. Without a required member, there is an option for
        each member that may be the last one. Each member is then at one position of the automaton, no matter whether
        other members precede it.
        """
        last = max((i for i, (_, required) in enumerate(members) if required), default=None)
        if last is not None:
            after: list[Node] = [Repeat(RegexSeq((self._comma, member)), 0, 1) for member, _ in members[last + 1 :]]
            more = [] if other is None else [Repeat(RegexSeq((self._comma, other)), 0, None)]
            return RegexSeq((*self._before(members[:last]), members[last][0], *after, *more))
        members = [(self._named(member), False) for member, _ in members]
        options: list[Node] = [RegexSeq((*self._before(members[:i]), member)) for i, (member, _) in enumerate(members)]
        if other is not None:
            other = self._named(other)
            options.append(RegexSeq((*self._before(members), Repeat(RegexSeq((other, self._comma)), 0, None), other)))
        return Alt(tuple(options))

    def _named(self, node: Node) -> Node:
        """Return a call of a new rule for ``node``, which is used many times."""
        name = f"part {len(self.rules)}"
        self.rules[name] = node
        return RuleCall(name)

    def _before(self, members: list[tuple[Node, bool]]) -> list[Node]:
        return [Repeat(RegexSeq((member, self._comma)), 1 if required else 0, 1) for member, required in members]

    def _counted(self, members: list[tuple[Node, bool]], other: Node | None, low: int, high: int | None) -> Node:
        """Return the pattern of ``low`` to ``high`` members, at least one, with a rule for each pair of a member and
        the number of members before it."""
        group = f"members {len(self.rules)}"

        def rest(index: int, count: int) -> Node:
            name = f"{group}, {index} after {count}"
            if name not in self.rules:
                self.rules[name] = Alt(())
                self.rules[name] = write(index, count)
            return RuleCall(name)

        def write(index: int, count: int) -> Node:
            comma = [self._comma] if count else []
            if index == len(members):
                return self._last(other, comma, low - count, None if high is None else high - count)
            member, required = members[index]
            more = min(count + 1, low) if high is None else count + 1
            taken = [] if count == high else [RegexSeq((*comma, member, rest(index + 1, more)))]
            return Alt((*taken, *([] if required else [rest(index + 1, count)])))

        return write(0, 0)

    def _last(self, other: Node | None, comma: list[Node], low: int, high: int | None) -> Node:
        """Return the pattern of ``low`` to ``high`` members that the schema does not name; ``low`` may be 0 or less."""
        nothing: list[Node] = [RegexSeq(())] if low <= 0 else []
        if other is None or high == 0:
            return Alt(tuple(nothing))
        more = Repeat(RegexSeq((self._comma, other)), max(low - 1, 0), None if high is None else high - 1)
        return Alt((*nothing, RegexSeq((*comma, other, more))))

    # -- what the schema leaves open -------------------------------------------------------------------------------------

    def _anything(self, depth: int | None) -> Node:
        name = "value" if depth is None else f"value {depth}"
        if name not in self.rules:
            self.rules[name] = Alt(())
            below = None if depth is None else depth - 1
            parts = [self.value({"type": kind}) for kind in ("null", "boolean", "number", "string")]
            self.rules[name] = Alt((*parts, *([] if depth == 0 else self._containers(below))))
        return RuleCall(name)

    def _containers(self, depth: int | None) -> list[Node]:
        item = self._anything(depth)
        member = RegexSeq((_quoted(Repeat(CHARACTER, 0, None)), literal(":"), self._space, item))
        kinds = ((item, "[]"), (member, "{}"))
        return [
            self._bracketed(Repeat(RegexSeq((self._repeated(part, 0, None), self._space)), 0, 1), both)
            for part, both in kinds
        ]


def _quoted(node: Node) -> Node:
    return RegexSeq((literal('"'), node, literal('"')))


def _pattern(text: str) -> Node:
    return without_escapes(whole(parse(text), search=True))


def _spelled(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return json.dumps(value) if any("\ud800" <= char <= "\udfff" for char in text) else text


def productive(start: Node, rules: dict[str, Node]) -> tuple[Node, dict[str, Node]]:
    """Return the start pattern and the rules without the options and rules that match no text.

    Raises ``SchemaRefusal`` if nothing is left.
    """
    productive_rules: dict[str, Node] = {}
    found = -1
    while found < len(productive_rules):
        found = len(productive_rules)
        for name in reversed(rules):  # a rule usually comes before the rules that it calls
            if name not in productive_rules and _pruned(rules[name], productive_rules) is not None:
                productive_rules[name] = rules[name]
    left = _pruned(start, productive_rules)
    if left is None:
        raise SchemaRefusal("#", "the schema allows nothing, so no answer can satisfy it")
    kept = {
        name: node
        for name in productive_rules
        if (node := _pruned(productive_rules[name], productive_rules)) is not None
    }
    return left, kept


def num_parts(node: Node) -> int:
    """Return the number of parts of a pattern as it is written; a repetition counts once."""
    match node:
        case RegexSeq(items) | Alt(items):
            return 1 + sum(map(num_parts, items))
        case Repeat(inner):
            return 1 + num_parts(inner)
        case _:
            return 1


def _pruned(node: Node, productive_rules: Mapping[str, Node]) -> Node | None:
    match node:
        case RegexSeq(items):
            parts = [_pruned(item, productive_rules) for item in items]
            return None if None in parts else RegexSeq(tuple(part for part in parts if part is not None))
        case Alt(options):
            left = tuple(kept for option in options if (kept := _pruned(option, productive_rules)) is not None)
            return (left[0] if len(left) == 1 else Alt(left)) if left else None
        case Repeat(inner, low, high):
            kept = _pruned(inner, productive_rules)
            return Repeat(kept, low, high) if kept is not None else (None if low else RegexSeq(()))
        case RuleCall(name):
            return node if name in productive_rules else None
        case _:
            return node

"""Parse regular expressions of JSON Schema and of requests (ECMA-262 without assertions) into a small tree.

Grammar engines do not interpret regexes reliably: they drop anchors in the middle and lookaheads with a warning, and
``[^a]`` inside a JSON string may match a backslash. Therefore patterns are parsed here, refused if they need more than
a regular language without assertions, and written back in the simplest form: groups, ``|``, quantifiers and positive
character classes, which every engine and Python's ``re`` interpret alike.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_CODE = 0x10FFFF
Ranges = tuple[tuple[int, int], ...]


class PatternError(ValueError):
    """Raised when the pattern is malformed, or when it contains a ``construct`` that cannot be enforced."""

    def __init__(self, message: str, construct: str | None = None) -> None:
        super().__init__(message)
        self.construct = construct


@dataclass(frozen=True, slots=True)
class Chars:
    """Match one character out of sorted, disjoint, inclusive ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class RegexSeq:
    """Match the items one after the other. Without items, it matches the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """Match any one of the options."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Match ``node`` from ``low`` to ``high`` times; None is without bound."""

    node: Node
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """Match ``^`` or ``$``. ``patterns.whole`` removes anchors or refuses them."""

    sign: str


@dataclass(frozen=True, slots=True)
class RuleCall:
    """Match the rule with this name. Rule calls occur only in grammars made of several patterns, never in a parsed
    regex."""

    name: str


Node = Chars | RegexSeq | Alt | Repeat | Anchor | RuleCall


def ranges_of(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ``pairs``, sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def minus(ranges: Ranges, taken: Ranges) -> Ranges:
    """Return ``ranges`` without the code points of ``taken``."""
    for low, high in taken:
        cut = [(a, min(b, low - 1)) for a, b in ranges if a < low] + [
            (max(a, high + 1), b) for a, b in ranges if b > high
        ]
        ranges = ranges_of(cut)
    return ranges


def set_of(text: str) -> Ranges:
    """Return the characters of ``text`` as ranges."""
    return ranges_of((ord(c), ord(c)) for c in text)


SURROGATES: Ranges = ((0xD800, 0xDFFF),)
EVERY = minus(((0, MAX_CODE),), SURROGATES)
DIGIT = ((0x30, 0x39),)
WORD = ranges_of([*DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)])
SPACE = ranges_of([(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)])  # fmt: skip
NEWLINE = set_of("\n\r\u2028\u2029")
JSON_ESCAPED = ranges_of([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
"""Characters that a JSON string can contain only as an escape sequence."""

_SETS = {"d": DIGIT, "w": WORD, "s": SPACE, "D": minus(EVERY, DIGIT), "W": minus(EVERY, WORD), "S": minus(EVERY, SPACE)}  # fmt: skip
_CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
_QUANTIFIER = re.compile(r"[*+?]|\{(\d+)(?:(,)(\d*))?\}")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def fail(self, message: str, construct: str | None = None) -> PatternError:
        return PatternError(f"{message} at position {self.at} of {self.text!r}", construct)

    def peek(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) if found else 0
        return found

    def match(self, pattern: str) -> re.Match[str] | None:
        found = re.compile(pattern).match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def alternatives(self) -> Node:
        options = [self.sequence()]
        while self.take("|"):
            options.append(self.sequence())
        return options[0] if len(options) == 1 else Alt(tuple(options))

    def sequence(self) -> Node:
        items: list[Node] = []
        while self.at < len(self.text) and not self.peek("|") and not self.peek(")"):
            items.append(self.quantified(self.atom()))
        return RegexSeq(tuple(items))

    def quantified(self, node: Node) -> Node:
        found = _QUANTIFIER.match(self.text, self.at)
        if not found:
            return node
        if isinstance(node, Anchor):
            raise self.fail("a quantifier after an anchor")
        self.at = found.end()
        self.take("?")  # lazy and greedy match the same texts
        if _QUANTIFIER.match(self.text, self.at):
            raise self.fail("two quantifiers in a row")
        low, high = self.bounds(found)
        if high is not None and high < low:
            raise self.fail(f"the quantifier {found[0]} has its bounds swapped")
        return Repeat(node, low, high)

    @staticmethod
    def bounds(found: re.Match[str]) -> tuple[int, int | None]:
        simple = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        if found[0] in simple:
            return simple[found[0]]
        low = int(found[1])
        return low, (int(found[3]) if found[3] else None) if found[2] else low

    def atom(self) -> Node:
        if self.take("("):
            return self.group()
        if self.take("["):
            return self.char_class()
        if self.take("."):
            return Chars(minus(EVERY, NEWLINE))
        if self.take("\\"):
            return Chars(self.escape(in_class=False))
        sign = self.text[self.at]
        if _QUANTIFIER.match(self.text, self.at):
            raise self.fail("a quantifier with nothing before it")
        self.at += 1
        return Anchor(sign) if sign in "^$" else Chars(set_of(sign))

    def group(self) -> Node:
        if self.peek("?") and not self.match(r"\?:|\?P?<[A-Za-z_]\w*>"):
            raise self.fail(
                "lookaround and inline flags are not supported, found", "(" + self.text[self.at : self.at + 2]
            )
        node = self.alternatives()
        if not self.take(")"):
            raise self.fail("an open parenthesis is never closed,")
        return node

    def escape(self, *, in_class: bool) -> Ranges:
        if self.at >= len(self.text):
            raise self.fail("a backslash with nothing after it")
        if found := self.match(r"u\{([0-9a-fA-F]+)\}|u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})"):
            code = int(found[1] or found[2] or found[3], 16)
            return ((min(code, MAX_CODE), min(code, MAX_CODE)),)
        if found := self.match(r"c([A-Za-z])"):
            return ((ord(found[1]) % 32, ord(found[1]) % 32),)
        sign = self.text[self.at]
        self.at += 1
        if sign in _SETS:
            return _SETS[sign]
        if sign in _CONTROLS and not (sign == "0" and self.match(r"(?=\d)")):
            return ((_CONTROLS[sign], _CONTROLS[sign]),)
        if in_class and sign == "b":
            return ((8, 8),)
        if sign.isalnum():
            raise self.fail(
                f"the escape \\{sign} (backreference, assertion or property class) is not supported,", f"\\{sign}"
            )
        return set_of(sign)

    def char_class(self) -> Node:
        negated = self.take("^")
        parts: list[tuple[int, int]] = []
        while not self.take("]"):
            parts += self.class_item()
        ranges = minus(ranges_of(parts), SURROGATES)
        return Chars(minus(EVERY, ranges) if negated else ranges)

    def class_item(self) -> Ranges:
        low = self.class_char()
        if not self.peek("-") or self.peek("-]"):
            return low
        self.at += 1
        high = self.class_char()
        codes = [pair for pair in (*low, *high) if pair[0] == pair[1]]
        if len(low) != 1 or len(high) != 1 or len(codes) != 2:
            return ranges_of([*low, *high, (0x2D, 0x2D)])  # [\w-.]: the dash is a dash
        if codes[0] > codes[1]:
            raise self.fail("a class has a range with its ends swapped")
        return ((codes[0][0], codes[1][0]),)

    def class_char(self) -> Ranges:
        if self.at >= len(self.text):
            raise self.fail("an open bracket is never closed,")
        if self.take("\\"):
            return self.escape(in_class=True)
        self.at += 1
        return set_of(self.text[self.at - 1])


def parse(text: str) -> Node:
    """Parse a pattern. Raises ``PatternError``."""
    parser = _Parser(text)
    node = parser.alternatives()
    if parser.at < len(text):
        raise parser.fail("a closing parenthesis without an open one")
    return node

"""Read llama.cpp's GBNF into rules and write them as Lark for llguidance.

llguidance's lexer takes the longest match and never goes back: ``"ab" "cd" | "abce"`` would lose ``abcd``. Therefore a
grammar without recursion becomes one terminal, which is an automaton and exact. In all other grammars every literal is
written character by character, so that no terminal is a prefix of another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from dovetail_grammar.patterns import emit
from dovetail_grammar.regex_parser import EVERY, Chars, PatternError, parse

_SPACE = re.compile(r"(?:[ \t]|#[^\n]*)*")
_SPACES = re.compile(r"(?:\s|#[^\n]*)*")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"')
_CLASS = re.compile(r"\[\^?(?:[^\]\\\n]|\\.)*\]")
_REPEAT = re.compile(r"[*+?]|\{(\d+)(?:(,)(\d*))?\}")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_PLAIN = {"n": "\n", "r": "\r", "t": "\t", **{sign: sign for sign in '"\\[]-^'}}
MAX_REPEAT = 1000


class GbnfError(ValueError):
    """Raised when the grammar is malformed."""


@dataclass(frozen=True, slots=True)
class GbnfRule:
    """Hold the body of a rule in Lark, with rule names written as ``<name>``, and the set of these names."""

    body: str
    names: frozenset[str]


def to_lark(text: str) -> str:
    """Return the grammar as Lark whose start rule is ``start``, without the ``%llguidance`` line. Raises ``GbnfError``."""
    rules = _Reader(text).rules()
    if "root" not in rules:
        raise GbnfError("there is no rule 'root'")
    for name, rule in rules.items():
        if missing := sorted(rule.names - rules.keys()):
            raise GbnfError(f"rule {name!r} refers to {missing[0]!r}, which is not a rule")
    regular = not any(_reaches(rules, name, name) for name in rules)
    names = {name: (f"R{i}" if regular else f"r{i}") for i, name in enumerate(rules)}
    lines = [f"{names[name]}: {_rename(rule.body, names)}" for name, rule in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines, ""])


def _rename(body: str, names: dict[str, str]) -> str:
    parts = re.split(r'("(?:[^"\\]|\\.)*"|/(?:[^/\\]|\\.)*/)', body)
    return "".join(p if i % 2 else re.sub(r"<([^>]+)>", lambda m: names[m[1]], p) for i, p in enumerate(parts))


def _reaches(rules: dict[str, GbnfRule], start: str, goal: str) -> bool:
    seen: set[str] = set()
    left = set(rules[start].names)
    while left - seen:
        name = (left - seen).pop()
        seen.add(name)
        left |= rules[name].names
    return goal in seen


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.names: set[str] = set()

    def fail(self, message: str) -> GbnfError:
        line = self.text.count("\n", 0, self.at) + 1
        return GbnfError(f"{message} in line {line}, at {self.text[self.at : self.at + 20]!r}")

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        self.at = found.end() if found else self.at
        return found

    def rules(self) -> dict[str, GbnfRule]:
        rules: dict[str, GbnfRule] = {}
        self.match(_SPACES)
        while self.at < len(self.text):
            name = self.match(_NAME)
            if not name:
                raise self.fail("a rule must begin with its name")
            if not self.match(re.compile(r"[ \t]*::=")):
                raise self.fail(f"'::=' must follow the name {name[0]!r}")
            self.names = set()
            body = self.alternatives(_SPACE)
            rules[name[0]] = GbnfRule(body, frozenset(self.names))
            if self.at < len(self.text) and self.text[self.at] not in "\r\n":
                raise self.fail("this is not a part of a rule:")
            self.match(_SPACES)
        return rules

    def alternatives(self, space: re.Pattern[str]) -> str:
        options: list[str] = []
        while True:
            self.match(_SPACES)
            options.append(self.sequence(space))
            if not self.match(re.compile(r"(?:\s|#[^\n]*)*\|")):
                return " | ".join(options)

    def sequence(self, space: re.Pattern[str]) -> str:
        items: list[str] = []
        while (item := self.item()) is not None:
            self.match(space)
            items.append(item + self.repeat())
            self.match(space)
        return " ".join(items) or '""'

    def item(self) -> str | None:
        """Read one literal, class, name, dot or group, and return it as Lark, or None if there is none. A name before
        ``::=`` belongs to the next rule."""
        if found := self.match(_LITERAL):
            return _string(found[1])
        if found := self.match(_CLASS):
            return self.char_class(found[0])
        if self.text.startswith(".", self.at):
            self.at += 1
            return f"/{emit(Chars(EVERY))}/"
        if self.text.startswith("(", self.at):
            return self.group()
        name = _NAME.match(self.text, self.at)
        if name is None or re.compile(r"[ \t]*::=").match(self.text, name.end()):
            return None
        self.at = name.end()
        self.names.add(name[0])
        return f"<{name[0]}>"

    def group(self) -> str:
        self.at += 1
        body = self.alternatives(_SPACES)
        self.match(_SPACES)
        if not self.text.startswith(")", self.at):
            raise self.fail("an open parenthesis is never closed,")
        self.at += 1
        return f"({body})"

    def repeat(self) -> str:
        found = self.match(_REPEAT)
        if not found or not found[1]:
            return found[0] if found else ""
        low, high = int(found[1]), (int(found[3]) if found[3] else None) if found[2] else int(found[1])
        if max(low, high or 0) > MAX_REPEAT or (high is not None and high < low):
            raise self.fail(
                f"the repetition {found[0]} is not allowed: counts must be ascending and at most {MAX_REPEAT},"
            )
        return f"{{{low},{'' if high is None else high}}}"

    def char_class(self, text: str) -> str:
        plain = _ESCAPE.sub(lambda m: _class_escape(_char(m)), text)
        try:
            return f"/{emit(parse(plain))}/"
        except PatternError as error:
            raise self.fail(f"the class {text} cannot be read: {error}") from error


def _class_escape(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"


def _char(found: re.Match[str]) -> str:
    code = found[1] or found[2] or found[3]
    if code:
        value = int(code, 16)
        if value > 0x10FFFF or 0xD800 <= value < 0xE000:
            raise GbnfError(f"the escape {found[0]} is not a character")
        return chr(value)
    if found[4] not in _PLAIN:
        raise GbnfError(f"the escape {found[0]} is not known; allowed: {' '.join(_PLAIN)} x u U")
    return _PLAIN[found[4]]


def _string(text: str) -> str:
    plain = _ESCAPE.sub(_char, text)
    return " ".join(_quoted(char) for char in plain) if plain else '""'


def _quoted(char: str) -> str:
    return {'"': r'"\""', "\\": r'"\\"'}.get(char) or (f'"\\u{ord(char):04x}"' if ord(char) < 0x20 else f'"{char}"')

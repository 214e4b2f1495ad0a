"""Check the size and the nesting of the text of a constraint before any backend reads it."""

from __future__ import annotations

import re
from itertools import accumulate

from dovetail.errors import GrammarError
from dovetail.sampling_params import GrammarKind, GrammarSpec

MAX_TEXT_BYTES = 256 * 1024
MAX_NESTING = 200
"""Limit the nesting of brackets. Schemas in real use stay below 40; recursive parsers overflow their stack at a few
thousand."""

# Every alternative ends at the end of the text at the latest, so that no text is scanned twice.
_JSON = re.compile(r'"(?:[^"\\]|\\.)*+"?|([\[{])|([\]}])', re.DOTALL)
_REGEX = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*+\]?|(\()|(\))", re.DOTALL)
_GBNF = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|\[(?:[^\]\\\n]|\\.)*+\]?|([({])|([)}])', re.DOTALL)
_LARK = re.compile(r'\\.|"(?:[^"\\\n]|\\.)*+"?|([(\[{])|([)\]}])', re.DOTALL)
_BRACKETS = {GrammarKind.REGEX: _REGEX, GrammarKind.EBNF: _GBNF, GrammarKind.LARK: _LARK}


def check_size(spec: GrammarSpec) -> None:
    """Raise ``GrammarError`` for a text of more than ``MAX_TEXT_BYTES`` in UTF-8."""
    size = len(spec.text) if spec.text.isascii() else len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_TEXT_BYTES:
        raise GrammarError(f"the {spec.kind} has {size} bytes; allowed: {MAX_TEXT_BYTES}", param=spec.kind)


def check_nesting(spec: GrammarSpec) -> None:
    """Raise ``GrammarError`` for brackets that are nested more than ``MAX_NESTING`` deep. The time is linear in the
    text, which need not be valid."""
    depth = nesting(spec)
    if depth > MAX_NESTING:
        raise GrammarError(f"the {spec.kind} is nested {depth} deep; allowed: {MAX_NESTING}", param=spec.kind)


def nesting(spec: GrammarSpec) -> int:
    """Return the deepest nesting of brackets outside of strings and character classes."""
    found = _BRACKETS.get(spec.kind, _JSON).finditer(spec.text)
    steps = (1 if match[1] else -1 for match in found if match[1] or match[2])
    return max(accumulate(steps, lambda depth, step: max(depth + step, 0)), default=0)

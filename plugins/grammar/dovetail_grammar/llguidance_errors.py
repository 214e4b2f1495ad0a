"""Find the keyword that llguidance does not support in its error messages."""

from __future__ import annotations

import re

from dovetail.errors import GrammarError
from dovetail.sampling_params import GrammarKind
from dovetail_grammar.schema_rules import KNOWN

_KEYWORDS: tuple[tuple[re.Pattern[str], str | None], ...] = (
    (re.compile(r'Unimplemented keys: \["([^"]+)"'), None),
    (re.compile(r"Unknown format"), "format"),
    (re.compile(r"oneOf constraints"), "oneOf"),
    (re.compile(r"min/maxProperties"), "minProperties"),
    (re.compile(r"patternProperty regexes"), "patternProperties"),
    (re.compile(r"retrieving it failed|[Pp]ointer|[Uu]nresolvable|[Rr]eference"), "$ref"),
    (re.compile(r"number range|(integer|float) range"), "minimum"),
    (re.compile(r"recursion limit"), "nesting"),
    (re.compile(r"too large|limit|fuel|too complex|too many"), "size"),
)
"""Pairs of a pattern of messages and the keyword at fault. The keyword is None if the pattern captures it in the
message."""

_WRONG_FOR_ALL = re.compile(r"Unsatisfiable schema|required property .* is unsatisfiable")


def refusal(kind: GrammarKind, message: str) -> GrammarError:
    """Return the error for a constraint that llguidance has refused."""
    reason = message.split("\n")[0].strip()
    found = keyword(kind, message)
    what = f" ({found!r} is not supported by it here)" if found else ""
    return GrammarError(f"llguidance cannot compile this {kind}{what}: {reason}", param=kind, keyword=found)


def keyword(kind: GrammarKind, message: str) -> str | None:
    """Return the keyword that llguidance does not support, or None if the constraint is wrong for every backend."""
    if _WRONG_FOR_ALL.search(message):
        return None
    for pattern, name in _KEYWORDS:
        if found := pattern.search(message):
            return name or found[1]
    if kind is not GrammarKind.JSON_SCHEMA:
        return None
    return next((word for word in re.findall(r"\$?\w+", message) if word in KNOWN), str(kind))

"""Write the marks of a format in grammars. Control characters represent marks that are special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_FIRST = 0x0E


class Marks:
    """Hold the marks of a format for one model, and write them in grammars. A mark that is a special token has a
    stand-in, the character that represents it in grammars (``ConstraintGate.marks``)."""

    def __init__(self, marks: Sequence[str], special: frozenset[str]) -> None:
        self._marks = marks
        self._stand_ins = {mark: chr(_FIRST + i) for i, mark in enumerate(m for m in marks if m in special)}

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Return pairs (mark, stand-in) of the marks that are special tokens, for ``ConstraintGate.marks``."""
        return tuple(self._stand_ins.items())

    def write(self, text: str) -> str:
        """Return ``text`` as it is written in a grammar, with stand-ins in place of marks."""
        for mark, stand_in in self._stand_ins.items():
            text = text.replace(mark, stand_in)
        return text

    def literal(self, text: str) -> str:
        """Return ``text`` as a literal of a Lark grammar."""
        return json.dumps(self.write(text), ensure_ascii=False)

    def terminals(self) -> list[str]:
        """Return two Lark terminals: ``ANY`` is any text, ``FREE`` is text without a mark."""
        found = "|".join(re.sub(r"[^\w<>\-]", _escaped, self.write(mark), flags=re.ASCII) for mark in self._marks)
        return ["ANY: /(?s:.*)/", f"FREE: ANY & ~/(?s:.*)(?:{found})(?s:.*)/"]


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x80 else found[0]


def json_block(schema: Mapping[str, Any]) -> str:
    """Return an expression for Lark grammars that matches JSON texts of ``schema``."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"

"""Write JSON values as Python literals, and texts as literals of GBNF."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any


def is_a(value: Any, kind: str) -> bool:
    """Return True if a JSON value is of type ``kind`` of JSON Schema."""
    match kind:
        case "string":
            return isinstance(value, str)
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "array":
            return isinstance(value, list)
    return isinstance(value, dict)


def literal(value: Any) -> str:
    """Return a JSON value as a Python literal. Raises ``ValueError`` for what has none."""
    if isinstance(value, str):
        value.encode()
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{literal(key)}: {literal(part)}' for key, part in value.items())}}}"
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number of JSON")
    return repr(value)


def quoted(text: str) -> str:
    """Return ``text`` as a literal of GBNF."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda found: f"\\x{ord(found[0]):02x}", escaped) + '"'


def repeat(low: int, high: int | None) -> str:
    """Return the suffix of GBNF that repeats an expression ``low`` to ``high`` times."""
    return f"{{{low},{'' if high is None else high}}}"

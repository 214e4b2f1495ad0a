"""Find the patterns that match the empty text, and remove the empty text from patterns."""

from __future__ import annotations

from dovetail_grammar.regex_parser import Alt, Node, RegexSeq, Repeat


def without_empty(node: Node) -> Node | None:
    """Return the pattern without the empty text, or None if nothing is left."""
    match node:
        case Alt(options):
            left = tuple(kept for option in options if (kept := without_empty(option)))
            return Alt(left) if left else None
        case RegexSeq(items):
            return _sequence_without_empty(items)
        case Repeat(inner, low, high):
            some = without_empty(inner) if may_be_empty(inner) else inner
            if some is None or high == 0:
                return None
            if some is inner:
                return Repeat(inner, max(low, 1), high)
            return RegexSeq((some, Repeat(some, 0, None if high is None else high - 1)))
        case _:
            return node


def _sequence_without_empty(items: tuple[Node, ...]) -> Node | None:
    if not all(map(may_be_empty, items)):
        return RegexSeq(items)
    options = [
        RegexSeq((some, *items[i + 1 :])) for i, item in enumerate(items) if (some := without_empty(item)) is not None
    ]
    return Alt(tuple(options)) if options else None


def may_be_empty(node: Node) -> bool:
    """Return true if the pattern matches the empty text. A call of a rule counts as false, because rules are not known
    here."""
    match node:
        case Alt(options):
            return any(map(may_be_empty, options))
        case RegexSeq(items):
            return all(map(may_be_empty, items))
        case Repeat(inner, low, _):
            return low == 0 or may_be_empty(inner)
        case _:
            return False

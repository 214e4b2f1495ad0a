"""The empty text in patterns: which match it, and the same patterns without it."""

from __future__ import annotations

from dovetail_grammar.regex_parser import Alt, Node, Repeat, Seq


def without_empty(node: Node) -> Node | None:
    """The pattern without the empty text; None if nothing is left."""
    match node:
        case Alt(options):
            left = tuple(kept for option in options if (kept := without_empty(option)))
            return Alt(left) if left else None
        case Seq(items):
            return _sequence_without_empty(items)
        case Repeat(inner, low, high):
            some = without_empty(inner) if may_be_empty(inner) else inner
            if some is None or high == 0:
                return None
            if some is inner:
                return Repeat(inner, max(low, 1), high)
            return Seq((some, Repeat(some, 0, None if high is None else high - 1)))
        case _:
            return node


def _sequence_without_empty(items: tuple[Node, ...]) -> Node | None:
    if not all(map(may_be_empty, items)):
        return Seq(items)
    options = [
        Seq((some, *items[i + 1 :])) for i, item in enumerate(items) if (some := without_empty(item)) is not None
    ]
    return Alt(tuple(options)) if options else None


def may_be_empty(node: Node) -> bool:
    """True if the pattern matches the empty text. Of a rule that is not known here, and taken for false."""
    match node:
        case Alt(options):
            return any(map(may_be_empty, options))
        case Seq(items):
            return all(map(may_be_empty, items))
        case Repeat(inner, low, _):
            return low == 0 or may_be_empty(inner)
        case _:
            return False

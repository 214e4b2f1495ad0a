"""Long repetitions written as groups of shorter ones, for xgrammar.

Above 128 repetitions xgrammar 0.2 counts, and its masks then allow tokens that it refuses: of ``.{0,300}``, at 131,072 tokens,
422, most of them with a line break at the end; a request that samples one fails. Groups also compile in half the time.
"""

from __future__ import annotations

from dovetail_grammar.regex_parser import Alt, Node, Repeat, Seq

LONGEST = 128
"""Repetitions that stay as they are."""
_GROUP = 64


def grouped(node: Node) -> Node:
    """The same texts, by a pattern in which nothing is repeated more than ``LONGEST`` times, or without bound."""
    match node:
        case Repeat(inner, low, high):
            return _repeated(grouped(inner), low, high)
        case Seq(items):
            return Seq(tuple(grouped(item) for item in items))
        case Alt(options):
            return Alt(tuple(grouped(option) for option in options))
        case _:
            return node


def _repeated(node: Node, low: int, high: int | None) -> Node:
    if max(low, high or 0) <= LONGEST:
        return Repeat(node, low, high)
    if low and low != high:
        return Seq((_repeated(node, low, low), _repeated(node, 0, None if high is None else high - low)))
    if low:
        groups, rest = divmod(low, _GROUP)
    else:  # the rest, up to which any number is right, is at least one less than a group
        assert high is not None
        groups = (high - _GROUP + 1) // _GROUP
        rest = high - groups * _GROUP
    whole = _repeated(Repeat(node, _GROUP, _GROUP), groups if low else 0, groups)
    return Seq((whole, Repeat(node, rest if low else 0, rest))) if rest else whole

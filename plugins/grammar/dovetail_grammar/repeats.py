"""Rewrite long repetitions as groups of shorter ones, for xgrammar.

Above 128 repetitions xgrammar 0.2 uses a counter, and its masks then allow tokens that it later refuses. For
``.{0,300}`` and a vocabulary of 131,072 tokens these are 422 tokens, most of them with a line break at the end. A
request that samples one of them fails. Groups also compile in half the time.
"""

from __future__ import annotations

from dovetail_grammar.regex_parser import Alt, Node, RegexSeq, Repeat

LONGEST = 128
"""Maximum count of a repetition that is not rewritten."""
_GROUP = 64


def grouped(node: Node) -> Node:
    """Return a pattern of the same texts in which every repetition has at most ``LONGEST`` as its count, or no bound."""
    match node:
        case Repeat(inner, low, high):
            return _repeated(grouped(inner), low, high)
        case RegexSeq(items):
            return RegexSeq(tuple(grouped(item) for item in items))
        case Alt(options):
            return Alt(tuple(grouped(option) for option in options))
        case _:
            return node


def _repeated(node: Node, low: int, high: int | None) -> Node:
    if max(low, high or 0) <= LONGEST:
        return Repeat(node, low, high)
    if low and low != high:
        return RegexSeq((_repeated(node, low, low), _repeated(node, 0, None if high is None else high - low)))
    if low:
        groups, rest = divmod(low, _GROUP)
    else:  # the groups are optional, so the rest must cover every number up to at least one less than a group
        assert high is not None
        groups = (high - _GROUP + 1) // _GROUP
        rest = high - groups * _GROUP
    whole = _repeated(Repeat(node, _GROUP, _GROUP), groups if low else 0, groups)
    return RegexSeq((whole, Repeat(node, rest if low else 0, rest))) if rest else whole

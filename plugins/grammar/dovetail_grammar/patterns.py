"""Transform parsed patterns: remove anchors and characters that JSON escapes, apply length bounds, and write them as
text."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from dovetail_grammar.regex_parser import (
    EVERY,
    JSON_ESCAPED,
    Alt,
    Anchor,
    Chars,
    Node,
    PatternError,
    Ranges,
    RegexSeq,
    Repeat,
    RuleCall,
    minus,
    set_of,
)

ANYTHING = Repeat(Chars(EVERY), 0, None)


_SYNTAX = frozenset(r"\^$.|?*+()[]{}/-")


def whole(node: Node, *, search: bool) -> Node:
    """Return the pattern that matches the whole text, without anchors.

    With ``search``, the pattern may match anywhere, as JSON Schema defines. Otherwise it must match the whole text.
    Raises ``PatternError`` for anchors in the middle.
    """
    while isinstance(node, RegexSeq) and len(node.items) == 1 and isinstance(node.items[0], Alt | RegexSeq):
        node = node.items[0]
    if isinstance(node, Alt):
        return Alt(tuple(whole(option, search=search) for option in node.options))
    items = node.items if isinstance(node, RegexSeq) else (node,)
    starts = bool(items) and items[0] == Anchor("^")
    ends = bool(items) and items[-1] == Anchor("$")
    items = items[starts : len(items) - ends]
    _refuse_anchors(RegexSeq(items))
    before = () if starts or not search else (ANYTHING,)
    after = () if ends or not search else (ANYTHING,)
    return RegexSeq((*before, *items, *after))


def _refuse_anchors(node: Node) -> None:
    match node:
        case Anchor(sign):
            raise PatternError(
                f"the anchor {sign} is supported only at the ends of the pattern or of an alternative", sign
            )
        case Repeat(inner):
            _refuse_anchors(inner)
        case RegexSeq(items) | Alt(items):
            for item in items:
                _refuse_anchors(item)
        case Chars() | RuleCall():
            pass


def _rebuild(node: Node, change: Callable[[Ranges], Ranges]) -> Node:
    match node:
        case Chars(ranges):
            return Chars(change(ranges))
        case Repeat(inner, low, high):
            return Repeat(_rebuild(inner, change), low, high)
        case RegexSeq(items):
            return RegexSeq(tuple(_rebuild(item, change) for item in items))
        case Alt(options):
            return Alt(tuple(_rebuild(option, change) for option in options))
        case Anchor() | RuleCall():
            return node


def without_escapes(node: Node) -> Node:
    """Return the pattern without the characters that JSON has to escape. Raises ``PatternError`` if nothing is left."""
    return without(node, JSON_ESCAPED)


def without(node: Node, taken: Ranges) -> Node:
    """Return the pattern without the characters of ``taken``. Raises ``PatternError`` if nothing is left."""
    return checked(_rebuild(node, lambda ranges: minus(ranges, taken)))


def holds(node: Node, code: int) -> bool:
    """Return true if a character class of the pattern contains the character with this code point."""
    match node:
        case Chars(ranges):
            return any(low <= code <= high for low, high in ranges)
        case Repeat(inner):
            return holds(inner, code)
        case RegexSeq(items) | Alt(items):
            return any(holds(item, code) for item in items)
        case Anchor() | RuleCall():
            return False


def checked(node: Node) -> Node:
    """Return the pattern without the options and repetitions that match nothing. Raises ``PatternError`` if nothing is
    left."""
    pruned = _prune(node)
    if pruned is None:
        raise PatternError("it matches nothing, or only texts with characters that JSON must escape")
    return pruned


def _prune(node: Node) -> Node | None:
    match node:
        case Chars(ranges):
            return node if ranges else None
        case Repeat(inner, low, high):
            kept = _prune(inner)
            return Repeat(kept, low, high) if kept else (None if low else RegexSeq(()))
        case RegexSeq(items):
            parts = [_prune(item) for item in items]
            return None if None in parts else RegexSeq(tuple(part for part in parts if part))
        case Alt(options):
            left = tuple(kept for option in options if (kept := _prune(option)))
            return (left[0] if len(left) == 1 else Alt(left)) if left else None
        case Anchor() | RuleCall():
            return node


def width(node: Node) -> tuple[int, int | None]:
    """Return the minimum and the maximum number of characters of a match; None is without bound."""
    match node:
        case Repeat(inner, low, high):
            least, most = width(inner)
            return least * low, 0 if most == 0 else (None if high is None or most is None else most * high)
        case RegexSeq(items):
            pairs = [width(item) for item in items]
            return sum(least for least, _ in pairs), _total([most for _, most in pairs])
        case Alt(options):
            pairs = [width(option) for option in options]
            mosts = [most for _, most in pairs]
            return min(least for least, _ in pairs), None if None in mosts else max(most or 0 for most in mosts)
        case _:
            return 1, 1


def _total(counts: list[int | None]) -> int | None:
    return None if None in counts else sum(count or 0 for count in counts)


def size(node: Node) -> int:
    """Return the number of characters of the pattern with its repetitions written out, which its compile time depends
    on."""
    match node:
        case Repeat(inner, low, high):
            return size(inner) * max(high if high is not None else low + 1, 1)
        case RegexSeq(items) | Alt(items):
            return 1 + sum(size(item) for item in items)
        case _:
            return 1


def bounded(node: Node, low: int, high: int | None) -> Node | None:
    """Return the pattern narrowed to texts of ``low`` to ``high`` characters, or None if there are none.

    This is possible only if a single repetition of single characters determines the length. Otherwise it raises
    ``PatternError``.
    """
    least, most = width(node)
    if low <= least and (high is None or (most is not None and most <= high)):
        return node
    if (high is not None and (high < low or high < least)) or (most is not None and most < low):
        return None
    items = node.items if isinstance(node, RegexSeq) else (node,)
    loose = [i for i, item in enumerate(items) if len(set(width(item))) > 1]
    part = items[loose[0]] if len(loose) == 1 else None
    if isinstance(part, RegexSeq) and len(loose) == 1:
        part = bounded(part, low - least + width(part)[0], None if high is None else high - least + width(part)[0])
    elif isinstance(part, Repeat) and width(part.node) == (1, 1):
        fixed = least - part.low
        highs = [n for n in (part.high, None if high is None else high - fixed) if n is not None]
        part = Repeat(part.node, max(part.low, low - fixed), min(highs) if highs else None)
    else:
        raise PatternError(
            "a length bound together with a pattern with several parts of varying length is not supported"
        )
    return None if part is None else RegexSeq((*items[: loose[0]], part, *items[loose[0] + 1 :]))


def first(node: Node) -> Ranges:
    """Return the characters that a match can begin with, or every character if the match may be empty."""
    match node:
        case Chars(ranges):
            return ranges
        case Repeat(inner, low, _) if low:
            return first(inner)
        case RegexSeq(items) if items and width(items[0])[0]:
            return first(items[0])
        case Alt(options):
            return tuple(pair for option in options for pair in first(option))
        case _:
            return EVERY


def avoid(names: Iterable[str]) -> Node:
    """Return the pattern of every text that is not in ``names``."""
    return _avoid(sorted(set(names)))


def avoid_by_head(names: Iterable[str]) -> list[Node]:
    """Return disjoint patterns, by first character, that match every text except ``names`` and the empty text."""
    tails: dict[str, list[str]] = {}
    for name in sorted(filter(None, set(names))):
        tails.setdefault(name[0], []).append(name[1:])
    other = RegexSeq((Chars(minus(EVERY, set_of("".join(tails)))), ANYTHING))
    return [*(RegexSeq((Chars(set_of(head)), _avoid(rest))) for head, rest in tails.items()), other]


def _avoid(names: list[str]) -> Node:
    if not names:
        return ANYTHING
    heads = sorted({name[0] for name in names if name})
    other = RegexSeq((Chars(minus(EVERY, set_of("".join(heads)))), ANYTHING))
    empty: list[Node] = [] if "" in names else [RegexSeq(())]
    tails = {head: [name[1:] for name in names if name.startswith(head)] for head in heads}
    return Alt((*empty, *(RegexSeq((Chars(set_of(head)), _avoid(tails[head]))) for head in heads), other))


def literal(text: str) -> Node:
    """Return the pattern that matches only this text."""
    return RegexSeq(tuple(Chars(set_of(char)) for char in text))


def emit(node: Node) -> str:
    """Return the pattern, without anchors, as text that ECMA engines, Python and grammar engines interpret alike."""
    match node:
        case Chars(ranges):
            single = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
            return _code(ranges[0][0]) if single else f"[{''.join(map(_span, ranges))}]"
        case Repeat(inner, low, high):
            text = emit(inner) if isinstance(inner, Chars) else f"(?:{emit(inner)})"
            return text + _quantifier(low, high)
        case RegexSeq(items):
            return "".join(f"(?:{emit(item)})" if isinstance(item, Alt) else emit(item) for item in items)
        case Alt(options):
            return "|".join(emit(option) for option in options)
        case Anchor(sign):
            return sign
        case RuleCall(name):
            raise PatternError(f"the rule {name} cannot be written into a pattern")


def _quantifier(low: int, high: int | None) -> str:
    short = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}
    if (low, high) in short:
        return short[low, high]
    return f"{{{low}}}" if low == high else f"{{{low},{'' if high is None else high}}}"


def _span(pair: tuple[int, int]) -> str:
    low, high = pair
    return _code(low) if low == high else f"{_code(low)}-{_code(high)}"


def _code(code: int) -> str:
    char = chr(code)
    if char in _SYNTAX:
        return f"\\{char}"
    if code < 0x20:
        return f"\\x{code:02x}"
    return char if char.isprintable() or code > 0xFFFF else f"\\u{code:04x}"

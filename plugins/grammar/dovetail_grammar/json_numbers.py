"""Build patterns of the JSON numbers between two bounds.

Bounded fractions have up to six digits. Together with the integer digits these are at most fifteen, so that no two
texts are the same double, and a text is beyond a bound exactly if its number is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

from dovetail_grammar.patterns import literal
from dovetail_grammar.regex_parser import DIGIT, Alt, Chars, Node, RegexSeq, Repeat

_PLACES = 6
_UNIT = 10**_PLACES
_DIGIT = Chars(DIGIT)
_LEADING = Chars(((0x31, 0x39),))
_DIGITS = Repeat(_DIGIT, 1, None)
_FRACTION = Repeat(RegexSeq((literal("."), _DIGITS)), 0, 1)
_EXPONENT = Repeat(RegexSeq((Chars(((0x45, 0x45), (0x65, 0x65))), Repeat(Chars(((0x2B, 0x2B), (0x2D, 0x2D))), 0, 1), _DIGITS)), 0, 1)  # fmt: skip
_MINUS = literal("-")


def integer(low: int | None, high: int | None) -> Node:
    """Return the pattern of the integers from ``low`` to ``high``; there must be at least one. Without bounds, -0 is
    one of them."""
    if low is None and high is None:
        return RegexSeq((Repeat(_MINUS, 0, 1), _between(0, None)))
    return _signed(low, high, _between)


def number(low: Fraction | None, high: Fraction | None, *, above: bool, below: bool) -> Node:
    """Return the pattern of the numbers from ``low`` to ``high``; there must be at least one.

    ``low`` itself is excluded if ``above``, and ``high`` if ``below``. With bounds there is no exponent.
    """
    if low is None and high is None:
        return RegexSeq((Repeat(_MINUS, 0, 1), _between(0, None), _FRACTION, _EXPONENT))
    first = None if low is None else (math.floor(low * _UNIT) + 1 if above else math.ceil(low * _UNIT))
    last = None if high is None else (math.ceil(high * _UNIT) - 1 if below else math.floor(high * _UNIT))
    return _signed(first, last, _decimal)


def _signed(low: int | None, high: int | None, part: Callable[[int, int | None], Node]) -> Node:
    """Return the pattern of the numbers from ``low`` to ``high``; ``part`` builds the pattern of numbers of at least 0."""
    options: list[Node] = []
    if high is None or high >= 0:
        options.append(part(max(low or 0, 0), high))
    if low is None or low < 0:
        nearest = 1 if high is None else max(-high, 1)
        options.append(RegexSeq((_MINUS, part(nearest, None if low is None else -low))))
    return Alt(tuple(options))


def _between(low: int, high: int | None) -> Node:
    """Return the pattern of the integers from ``low``, at least 0, to ``high``, without leading zeros."""
    options: list[Node] = [literal("0")] if low == 0 else []
    low = max(low, 1)
    digits = len(str(low))
    if high is None:
        rest = Repeat(_DIGIT, digits, None)
        return Alt((*options, _span(str(low), "9" * digits), RegexSeq((_LEADING, rest))))
    while low <= high:
        digits = len(str(low))
        if low == 10 ** (digits - 1) and high >= 10 * low:  # cover whole powers of ten at once
            most = len(str(high + 1)) - 1
            options.append(RegexSeq((_LEADING, Repeat(_DIGIT, digits - 1, most - 1))))
            low = 10**most
            continue
        top = min(high, 10**digits - 1)
        options.append(_span(str(low), str(top)))
        low = top + 1
    return Alt(tuple(options))


def _span(low: str, high: str) -> Node:
    """Return the pattern of the digit strings from ``low`` to ``high``, which have the same length."""
    size = len(low)
    if set(low) <= {"0"} and set(high) <= {"9"}:
        return Repeat(_DIGIT, size, size)
    first, last = int(low[0]), int(high[0])
    if first == last:
        return RegexSeq((literal(low[0]), _span(low[1:], high[1:])))
    options: list[Node] = [RegexSeq((literal(low[0]), _span(low[1:], "9" * (size - 1))))]
    if first + 1 < last:
        options.append(RegexSeq((_digits(first + 1, last - 1), Repeat(_DIGIT, size - 1, size - 1))))
    options.append(RegexSeq((literal(high[0]), _span("0" * (size - 1), high[1:]))))
    return Alt(tuple(options))


def _digits(low: int, high: int) -> Node:
    return Chars(((0x30 + low, 0x30 + high),))


def _decimal(low: int, high: int | None) -> Node:
    """Return the pattern of the decimals from ``low`` to ``high`` millionths, both at least 0."""
    whole, part = divmod(low, _UNIT)
    nines = "9" * _PLACES
    if high is None:
        more = RegexSeq((_between(whole + 1, None), _FRACTION))
        return Alt((RegexSeq((literal(str(whole)), _fraction(f"{part:06}", nines))), more))
    top, end = divmod(high, _UNIT)
    if whole == top:
        return RegexSeq((literal(str(whole)), _fraction(f"{part:06}", f"{end:06}")))
    options: list[Node] = [RegexSeq((literal(str(whole)), _fraction(f"{part:06}", nines)))]
    if whole + 1 < top:
        options.append(RegexSeq((_between(whole + 1, top - 1), _FRACTION)))
    options.append(RegexSeq((literal(str(top)), _fraction("0" * _PLACES, f"{end:06}"))))
    return Alt(tuple(options))


def _fraction(low: str, high: str) -> Node:
    """Return the pattern of the fractional parts from ``low`` to ``high``: the point and digits, or the empty text for
    zero."""
    some = RegexSeq((literal("."), _some_digits(low, high)))
    return Repeat(some, 0, 1) if set(low) <= {"0"} else some


def _some_digits(low: str, high: str) -> Node:
    """Return the pattern of the digit strings that, padded with zeros at the end, are from ``low`` to ``high``. They
    have at least one digit, and at most the length of ``low`` and ``high``."""
    size = len(low)
    first, last = int(low[0]), int(high[0])
    if first == last:
        return RegexSeq((literal(low[0]), _more_digits(low[1:], high[1:])))
    options: list[Node] = [RegexSeq((literal(low[0]), _more_digits(low[1:], "9" * (size - 1))))]
    if first + 1 < last:
        options.append(RegexSeq((_digits(first + 1, last - 1), Repeat(_DIGIT, 0, size - 1))))
    options.append(RegexSeq((literal(high[0]), _more_digits("0" * (size - 1), high[1:]))))
    return Alt(tuple(options))


def _more_digits(low: str, high: str) -> Node:
    if not low:
        return RegexSeq(())
    if set(low) <= {"0"}:
        return Repeat(Repeat(_DIGIT, 1, len(low)) if set(high) <= {"9"} else _some_digits(low, high), 0, 1)
    return _some_digits(low, high)

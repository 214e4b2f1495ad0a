"""Give xgrammar a vocabulary for which its masks allow every token that it accepts.

xgrammar sorts the tokens and, when one is rejected, skips all that follow it until one does not *contain* it, although
only those that *begin* with it are rejected too (seen in 0.2.8). After "ed", it skips "eed": with the literal
"guaranteed", the mask after "guarant" lacks "eed", which is accepted. A token that is sorted between the two and does not
contain the first ends the skipping. The beginning of the second up to the byte in which the two differ, here "ee", is
such a token.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple


class SeparatedTexts(NamedTuple):
    """Hold the bytes of every token, empty for ids that are not used, twice: ``texts`` are those that a text may
    contain, and ``with_separators`` has also the separators, at ids that are not used."""

    texts: list[bytes]
    with_separators: list[bytes]


def separated(texts: Sequence[bytes], kept: Collection[int]) -> SeparatedTexts:
    """Add separators to the bytes of a vocabulary, at ids with empty bytes that are not in ``kept``. If there are too few
    such ids, the tokens that would be skipped are emptied instead, so that no mask allows them and none is accepted."""
    usable, skipped = list(texts), dict(_skipped(texts))
    free = [token for token, text in enumerate(usable) if not text and token not in kept]
    while len(set(skipped.values())) > len(free):
        free += [token for token, text in enumerate(usable) if text in skipped]
        usable = [b"" if text in skipped else text for text in usable]
        skipped = dict(_skipped(usable))
    every = list(usable)
    for token, text in zip(free, sorted(set(skipped.values())), strict=False):
        every[token] = text
    return SeparatedTexts(usable, every)


def _skipped(texts: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each text that would be skipped because it contains a text before it, and the separator of the two."""
    beginnings: list[bytes] = []  # of the text before, shortest first
    for text in sorted(set(texts) - {b""}):
        while beginnings and not text.startswith(beginnings[-1]):
            before = beginnings.pop()
            if before in text:
                yield text, text[: 1 + next(at for at, byte in enumerate(before) if byte != text[at])]
        beginnings.append(text)

"""Divide the tokens of rows among steps in many ways. Batch invariant attention gives a query the same bits in all of
them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dovetail.interfaces.features import Feature
from dovetail.testing.attention_cases import MIXED, SINKS, SOFT_CAP, VERIFY, WINDOW
from dovetail.testing.attention_reference import AttentionCase, AttentionStep

RowSpan = tuple[int, int, int]
"""(row, start, stop): these tokens of a row enter in a step; the tokens before them are in the pool."""


@dataclass(frozen=True)
class Division:
    """Describe steps in which the last tokens of row 0 enter.

    ``cuts`` are the indices at which the steps begin, counted from the end of the row; None is its first query.
    ``others`` are the other rows of each step, with the number of their tokens that enter. The first ``prompts`` of
    them extend, and so does row 0 if ``extends`` is set.
    """

    features: tuple[Feature, ...]
    cuts: Sequence[int | None]
    others: Sequence[tuple[int, int]]
    prompts: int = 0
    extends: bool = False

    def parts(self, first: int, length: int) -> Iterator[RowSpan]:
        """Yield the tokens of row 0, which has ``length`` tokens, that enter in each of its steps."""
        starts = [first if cut is None else length - cut for cut in self.cuts]
        return ((0, start, stop) for start, stop in itertools.pairwise([*starts, length]))

    def together(self, part: RowSpan, lens: Sequence[int]) -> tuple[list[RowSpan], int]:
        """Return all parts of one step, with ``part`` among the others, and the number of them that extend."""
        parts = [(row, lens[row] - count, lens[row]) for row, count in self.others]
        parts.insert(1 if self.extends else self.prompts + 1, part)
        return parts, self.prompts + self.extends


PROMPTS, SINGLE, CHAINS = ((1, 40), (4, 50)), ((2, 1), (5, 1)), ((1, 3), (2, 1), (3, 6), (5, 2))
MANY = tuple((row, 1) for row in range(1, 66))
DIVISIONS: Mapping[str, Division] = {
    "a whole prompt": Division((), (None,), PROMPTS, 2, extends=True),
    "chunks": Division((), (None, 33, 9, 3), PROMPTS, 2, extends=True),
    "a chunk with decode rows": Division((MIXED,), (9,), (*PROMPTS, *SINGLE), 2, extends=True),
    "decode steps": Division((), range(9, 0, -1), ((1, 1), *SINGLE, (3, 1))),
    "decode steps of many rows": Division((), (2, 1), MANY),
    "decode steps with prompts": Division((MIXED,), (2, 1), (*PROMPTS, *SINGLE), 2),
    "a chain of drafts": Division((VERIFY,), (9,), CHAINS),
    "chains of several lengths": Division((VERIFY,), (9, 7, 4), CHAINS),
    "chains with prompts": Division((VERIFY, MIXED), (9, 5), (*PROMPTS, *SINGLE), 2),
}

LENGTH, LONG = 150, 1580
OTHER_LENS = (40, 700, 7, 64, 260, *(3 + row % 37 for row in range(len(MANY) - 5)))
"""The number of tokens of the rows other than row 0."""

VARIANTS: Mapping[str, tuple[dict[str, Any], tuple[Feature, ...]]] = {
    "pages of 1": ({"page_size": 1}, ()),
    "pages of 4": ({"page_size": 4}, ()),
    "pages of 16": ({"page_size": 16}, ()),
    "window": ({"page_size": 16, "window": 40}, (WINDOW, Feature.ATTN_INVARIANT_WINDOW)),
    "bfloat16": ({"page_size": 16, "dtype": torch.bfloat16, "heads": 8}, ()),
    "float16": ({"page_size": 16, "dtype": torch.float16, "heads": 7, "kv_heads": 1}, ()),
    "fp8_e4m3": ({"page_size": 16, "dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}, ()),
    "head_dim 128": ({"page_size": 16, "head_dim": 128}, ()),
    "soft cap": ({"soft_cap": 1.5, "scale": 0.5}, (SOFT_CAP,)),
    "sinks": ({"sinks": True}, (SINKS,)),
}
"""What each variant of the case changes, and the features that it needs."""


class DividedRows:
    """Hold rows of ``lens`` tokens in one pool, with a query for each token. ``step`` lets any of the tokens enter."""

    def __init__(self, case: AttentionCase, lens: Sequence[int], device: torch.device) -> None:
        self.whole = AttentionStep(replace(case, prefix=[0] * len(lens), extend=lens, batch_invariant=True), device)
        self.lens = lens
        self._starts = [0, *itertools.accumulate(lens)]

    def queries(self, parts: Sequence[RowSpan]) -> torch.Tensor:
        """Return the queries of the tokens of ``parts``, ``[tokens, heads, head_dim]``."""
        starts = self._starts
        return torch.cat([self.whole.q[starts[row] + start : starts[row] + stop] for row, start, stop in parts])

    def ends(self, counts: Sequence[int]) -> list[RowSpan]:
        """Return the last ``counts[r]`` tokens of each row r."""
        return [(row, self.lens[row] - count, self.lens[row]) for row, count in enumerate(counts)]

    def step(self, parts: Sequence[RowSpan], num_extend: int) -> AttentionStep:
        """Return a step in which the first ``num_extend`` of ``parts`` extend, and the others decode or verify
        chains."""
        rows = [row for row, _, _ in parts]
        prefix, extend = [start for _, start, _ in parts], [stop - start for _, start, stop in parts]
        chains = [list(range(-1, count - 2)) for count in extend[num_extend:]]
        case = replace(
            self.whole.case,
            prefix=prefix,
            extend=extend,
            num_extend=num_extend,
            trees=chains if any(chains) else None,
        )
        step = AttentionStep(case, self.whole.device, self.whole)
        step.table, step.batch.page_table = self.whole.table[rows], self.whole.batch.page_table[rows]
        step.q, step.layer = self.queries(parts), self.whole.layer
        return step

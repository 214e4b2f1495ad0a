"""Fill the grammar bitmasks of a step, including those of its drafts, on the host."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from dovetail.errors import RequestError
from dovetail.types import LogitRows, Masks

if TYPE_CHECKING:
    from dovetail.interfaces.grammar import Matcher
    from dovetail.types import IntArray, Req, StepPlan


log = logging.getLogger(__name__)

_SLOW_CALL = 0.005
_SLOW_ROW = 0.0005
"""A call that fills the masks of n requests is slow if it takes more than ``_SLOW_CALL + n * _SLOW_ROW`` seconds. The
masks of its requests are then filled one by one in later steps, so that the time of each is known. Usual masks take a
tenth of this."""


def fill_masks(plan: StepPlan, reqs: Sequence[Req], width: int, buffer: Callable[[int, int], IntArray]) -> Masks | None:
    """Return the bitmasks of the sampled rows of ``plan`` whose requests have a grammar and have not ended, and of their
    drafts; None if there are no such rows.

    ``reqs`` are the requests of all rows. ``buffer(rows, width)`` returns uninitialised memory for bitmasks, int32. If
    a matcher raises, its request's ``error`` is set, and the other rows are masked as usual.
    """
    layout = LogitRows.of(plan)
    found = [
        (start, span, row, reqs[row])
        for row, start, span in zip(layout.rows.tolist(), layout.starts.tolist(), layout.spans.tolist(), strict=True)
        if reqs[row].matcher is not None and reqs[row].finish is None
    ]
    if not found:
        return None
    spans = [span for _, span, _, _ in found]
    bitmask = buffer(sum(spans), width)
    if plan.drafts is not None:
        bitmask.fill(-1)
    firsts = list(itertools.accumulate(spans, initial=0))[:-1]
    _fill_roots([(req, first) for (_, _, _, req), first in zip(found, firsts, strict=True)], bitmask)
    for (_, span, row, req), first in zip(found, firsts, strict=True):
        if span > 1 and req.error is None:
            assert plan.drafts is not None
            part = bitmask[first : first + span]
            drafts, parents = plan.drafts.row(row)
            _guarded(req, part, lambda req=req, part=part, d=drafts, p=parents: _fill_drafts(req.matcher, part, d, p))
    rows = [row for start, span, _, _ in found for row in range(start, start + span)]
    return Masks(bitmask, np.array(rows, np.int64))


def _fill_roots(reqs: Sequence[tuple[Req, int]], bitmask: IntArray) -> None:
    """Fill the masks of the next tokens, each at the given row of ``bitmask``. All requests of one grammar backend are
    filled with one call, except requests whose masks were slow."""
    together: dict[int, list[tuple[Req, Matcher, int]]] = {}
    for req, row in reqs:
        matcher = req.matcher.inner
        if matcher is None or req.masks is None:
            _guarded(req, bitmask[row : row + 1], lambda req=req, row=row: req.matcher.fill_bitmask(bitmask, row))
        elif req.meter is not None and req.meter.alone:
            _fill_alone(req, matcher, bitmask, row)
        else:
            together.setdefault(id(req.masks), []).append((req, matcher, row))
    for group in together.values():
        _fill_group(group, bitmask)


def _fill_group(group: Sequence[tuple[Req, Matcher, int]], bitmask: IntArray) -> None:
    """Fill the masks of one backend with one call. If this call raises, fill them one by one, so that only the requests
    whose matchers raise end."""
    if len(group) > 1:
        start = time.perf_counter()
        try:
            group[0][0].masks.fill_bitmasks([m for _, m, _ in group], bitmask, [row for _, _, row in group])
        except Exception:
            log.debug("masks are filled one by one", exc_info=True)
        else:
            slow = time.perf_counter() - start > _SLOW_CALL + _SLOW_ROW * len(group)
            for req, _, _ in group if slow else ():
                if req.meter is not None:
                    req.meter.alone = True
            return
    for req, matcher, row in group:
        _fill_alone(req, matcher, bitmask, row)


def _fill_alone(req: Req, matcher: Matcher, bitmask: IntArray, row: int) -> None:
    """Fill one mask, and charge the time that it took to the request's meter."""

    def fill() -> None:
        start = time.perf_counter()
        matcher.fill_bitmask(bitmask, row)
        seconds = time.perf_counter() - start
        if req.meter is not None:
            req.meter.alone = seconds > _SLOW_ROW
            req.meter.charge(seconds)

    _guarded(req, bitmask[row : row + 1], fill)


def _guarded(req: Req, part: IntArray, fill: Callable[[], None]) -> None:
    try:
        fill()
    except RequestError as error:
        log.warning("the grammar matcher of request %s gave up: %s", req.rid, error)
        req.error = str(error)
        part[:] = -1
    except Exception as error:
        log.exception("the grammar matcher of request %s failed", req.rid)
        req.error = f"the grammar matcher failed: {type(error).__name__}: {error}"
        part[:] = -1


def _fill_drafts(matcher: Matcher, bitmask: IntArray, drafts: list[int], parents: list[int]) -> None:
    """Fill the masks of all drafts by a walk down the tree. The mask of the root, at row 0, is already filled. The
    matcher's state is the same afterwards.

    A node that the grammar forbids is never accepted, so its mask and the masks below it are left as they are: they
    allow every token.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    _descend(matcher, bitmask, drafts, children, -1)


def _descend(
    matcher: Matcher, bitmask: IntArray, drafts: list[int], children: dict[int, list[int]], parent: int
) -> None:
    for node in children.get(parent, ()):
        if not matcher.accept(drafts[node]):
            continue
        if not matcher.is_terminated:
            matcher.fill_bitmask(bitmask, node + 1)
            _descend(matcher, bitmask, drafts, children, node)
        matcher.rollback(1)

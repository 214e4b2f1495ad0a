"""Select the part of a long queue that a policy may reorder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

from dovetail.types import Req

by_arrival = attrgetter("arrival")


class Window(NamedTuple):
    """Hold a queue in the order of arrival, divided into three parts."""

    overdue: list[Req]  # waited too long, so they go first
    free: list[Req]  # may be reordered
    rest: list[Req]  # beyond the window: keep their order and go last


def cut(waiting: Sequence[Req], size: int, max_wait_seconds: float) -> Window:
    """Divide ``waiting``: of the requests that are not overdue, the ``size`` oldest are free."""
    queue = sorted(waiting, key=by_arrival)
    deadline = time.monotonic() - max_wait_seconds
    late = next((i for i, req in enumerate(queue) if req.arrival > deadline), len(queue))
    return Window(queue[:late], queue[late : late + size], queue[late + size :])

"""Order waiting requests depth first over the tree of their prompts, heavier branches first.

Requests in one branch share its tokens: if they run one after another, each finds the prefix that the previous one left
in the cache, and the branch can be evicted when its last request has ended. The order is the same as in a walk over the
cache's own tree in which the weight of a node is the number of requests below it (https://arxiv.org/abs/2312.07104,
section 3). It does not need to read the cache: sorting prompts by their tokens makes each branch contiguous, and the
common lengths of adjacent prompts show where branches diverge.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dovetail.interfaces.policy import PolicyContext, SchedulePolicy
from dovetail.types import IntArray, Req
from dovetail_policies.config import DfsWeightConfig
from dovetail_policies.window import cut


class DfsWeight(SchedulePolicy):
    """Compare the ``window`` oldest requests, up to ``depth`` tokens each."""

    def __init__(self, config: DfsWeightConfig, context: PolicyContext) -> None:
        """Store ``config``, which limits the work."""
        self._config = config

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Return overdue requests, then the others branch by branch, then those outside the window."""
        overdue, free, rest = cut(waiting, self._config.window, self._config.max_wait_seconds)
        return overdue + self._by_branch(free) + rest

    def _by_branch(self, reqs: list[Req]) -> list[Req]:
        """Return ``reqs``, which are ordered by arrival, in depth-first order."""
        prompts = [req.token_ids[: min(req.known_len, self._config.depth)] for req in reqs]
        # big-endian bytes of token ids sort in the order of the token ids
        keys = [(req.namespace, prompt.astype(">i4").tobytes()) for req, prompt in zip(reqs, prompts, strict=True)]
        ages = sorted(range(len(reqs)), key=keys.__getitem__)
        shared = [
            self._shared(prompts[a], prompts[b]) if reqs[a].namespace == reqs[b].namespace else -1
            for a, b in itertools.pairwise(ages)
        ]
        return [reqs[age] for age in depth_first(ages, shared)]

    def _shared(self, a: IntArray, b: IntArray) -> int:
        """Return the number of tokens that two prompts share, rounded down to a multiple of the granularity."""
        n = min(len(a), len(b))
        equal = a[:n] == b[:n]
        length = n if equal.all() else int(np.argmin(equal))
        return length - length % self._config.granularity


def depth_first(ages: Sequence[int], shared: Sequence[int]) -> list[int]:
    """Return ``ages`` (the rank by arrival of each sorted prompt) in depth-first order: heavier branches first, and of
    equal ones the older first. ``shared[i]`` is the number of tokens that the sorted prompts i and i + 1 share.

        sorted   a   b   b   c   c   c     a branch is a range in which adjacent prompts share more
        shared     1   4   1   3   5       than at its borders; it divides where they share least
    """
    done: list[int] = []
    stack = [(0, len(ages))]
    while stack:
        start, stop = stack.pop()
        if stop - start <= 1:
            done += ages[start:stop]
            continue
        least = min(shared[start : stop - 1])
        borders = [start, *(i + 1 for i in range(start, stop - 1) if shared[i] == least), stop]
        branches = sorted(
            itertools.pairwise(borders),
            key=lambda branch: (branch[0] - branch[1], min(ages[slice(*branch)])),
        )
        stack += reversed(branches)
    return done

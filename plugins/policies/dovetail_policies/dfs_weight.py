"""Depth first over the tree of waiting prompts, heavier branches first.

Requests in one branch share its tokens: run one after another, each finds what the one before it left in the cache, and
the branch can be evicted when it is done. Equals the order of a walk over the cache's own tree, where a node's weight is
the number of requests below it (https://arxiv.org/abs/2312.07104, section 3), but needs no look into the cache: sorting
prompts by their tokens puts each branch side by side, and the common lengths of neighbours say where branches part.
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
    """Compares the ``window`` oldest requests, up to ``depth`` tokens each."""

    def __init__(self, config: DfsWeightConfig, context: PolicyContext) -> None:
        """``config`` bounds the work."""
        self._config = config

    def order(self, waiting: Sequence[Req], running: Sequence[Req]) -> list[Req]:
        """Overdue requests, then branch by branch, then those outside the window."""
        overdue, free, rest = cut(waiting, self._config.window, self._config.max_wait_seconds)
        return overdue + self._by_branch(free) + rest

    def _by_branch(self, reqs: list[Req]) -> list[Req]:
        """``reqs``, oldest first, in depth-first order."""
        prompts = [req.token_ids[: min(req.known_len, self._config.depth)] for req in reqs]
        # big-endian bytes of token ids sort as the token ids do
        keys = [(req.namespace, prompt.astype(">i4").tobytes()) for req, prompt in zip(reqs, prompts, strict=True)]
        ages = sorted(range(len(reqs)), key=keys.__getitem__)
        shared = [
            self._shared(prompts[a], prompts[b]) if reqs[a].namespace == reqs[b].namespace else -1
            for a, b in itertools.pairwise(ages)
        ]
        return [reqs[age] for age in depth_first(ages, shared)]

    def _shared(self, a: IntArray, b: IntArray) -> int:
        """Tokens that two prompts share, in whole multiples of the granularity."""
        n = min(len(a), len(b))
        equal = a[:n] == b[:n]
        length = n if equal.all() else int(np.argmin(equal))
        return length - length % self._config.granularity


def depth_first(ages: Sequence[int], shared: Sequence[int]) -> list[int]:
    """``ages`` (rank by arrival of each sorted prompt) in depth-first order, heavier branches first, older ones among
    equals. ``shared[i]`` is how many tokens the sorted prompts i and i + 1 have in common.

        sorted   a   b   b   c   c   c     a branch is a stretch in which neighbours share more
        shared     1   4   1   3   5       than at its borders; it parts where they share least
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

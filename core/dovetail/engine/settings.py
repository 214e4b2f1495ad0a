"""Collect the sampling settings of the rows of a batch. They are collected again only when the rows change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dovetail.ops.sampling import Filters
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.types import Req


_versions = itertools.count(1)


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Hold the settings of the sampled rows of a batch, by row.

    ``plain`` is True if all rows need an argmax and nothing else, and ``simple`` if all rows need at most filters and a
    random number. The other fields hold indices of rows: ``adjusted`` those whose logits depend on penalties, biases or
    ``min_new_tokens``, ``constrained`` those with a grammar, and ``logprobs`` those that request log-probabilities.
    ``top_logprobs`` is the largest number of most likely tokens that one of them requests. Settings with the same
    ``version`` are equal.
    """

    uids: tuple[int, ...]
    plain: bool
    simple: bool
    filters: Filters | None
    seeds: np.ndarray[Any, np.dtype[np.int64]]
    adjusted: tuple[int, ...]
    constrained: tuple[int, ...]
    logprobs: tuple[int, ...]
    top_logprobs: int
    version: int

    @classmethod
    def of(cls, reqs: Sequence[Req], vocab_size: int, device: torch.device) -> RowSettings:
        """Collect the settings of the requests in these rows."""
        params = [r.params for r in reqs]
        adjusted = tuple(i for i, p in enumerate(params) if p.penalised or p.min_new_tokens)
        constrained = tuple(i for i, r in enumerate(reqs) if r.matcher is not None)
        logprobs = tuple(i for i, p in enumerate(params) if p.logprobs is not None)
        greedy = all(p.greedy for p in params)
        simple = not (adjusted or constrained or logprobs)
        return cls(
            uids=tuple(r.uid for r in reqs),
            plain=greedy and simple,
            simple=simple,
            filters=None if greedy else _filters(reqs, vocab_size, device),
            seeds=np.array([r.seed for r in reqs], np.int64),
            adjusted=adjusted,
            constrained=constrained,
            logprobs=logprobs,
            top_logprobs=max((p.logprobs or 0 for p in params), default=0),
            version=next(_versions),
        )


def _filters(reqs: Sequence[Req], vocab_size: int, device: torch.device) -> Filters:
    params = [r.params for r in reqs]

    def column(values: list[float] | list[int], dtype: type[np.generic]) -> torch.Tensor:
        return to_device(np.array(values, dtype), device)[:, None]

    top_k = [p.top_k if p.top_k > 0 else vocab_size for p in params]
    return Filters(
        temperature=column([0.0 if p.greedy else p.temperature for p in params], np.float32),
        top_k=column(top_k, np.int64) if min(top_k) < vocab_size else None,
        top_p=column([p.top_p for p in params], np.float64) if any(p.top_p < 1 for p in params) else None,
        min_p=column([p.min_p for p in params], np.float64) if any(p.min_p > 0 for p in params) else None,
        any_greedy=any(p.greedy for p in params),
    )


def expand(filters: Filters, index: torch.Tensor) -> Filters:
    """Return the filters of the rows ``index``, in this order. A row can occur several times."""

    def pick(column: torch.Tensor | None) -> torch.Tensor | None:
        return None if column is None else column[index]

    return Filters(
        filters.temperature[index], pick(filters.top_k), pick(filters.top_p), pick(filters.min_p), filters.any_greedy
    )

"""Collect the sampling settings of the rows of a batch. They are collected again only when the rows change."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from dovetail.ops.sampling import Filters
from dovetail.ops.transfer import to_device

if TYPE_CHECKING:
    from dovetail.sampling_params import SamplingParams
    from dovetail.types import AdmittedRequest


_versions = itertools.count(1)


TOP_LADDER = (1, 5, 20)
"""The numbers of most likely tokens for which samplers are captured. A step takes the smallest that is large enough."""


MOST_EDITS = 64
"""The number of tokens with a bias or a block up to which the step of a row is sampled in a graph."""

BLOCKED = -1e30
"""The logit of a token that ``min_new_tokens`` forbids. It is finite, so that the token is still chosen if a grammar
allows no other token."""


class Edits(NamedTuple):
    """Hold biases and blocks of single tokens, ``[n, MOST_EDITS]``. To the logit of ``tokens[r, j]`` (int64),
    ``biases[r, j]`` (float32) is added before penalties are applied; while fewer than ``until[r, j]`` (int32) tokens
    precede the sampled one, the logit is ``BLOCKED``. A row with fewer edits repeats its first, or leaves token 0 as it
    is."""

    tokens: torch.Tensor
    biases: torch.Tensor
    until: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Hold the settings of the sampled rows of a batch, by row.

    ``plain`` is True if all rows need an argmax and nothing else, and ``simple`` if all rows need at most filters and a
    random number. ``capturable`` is True if they need at most these, penalties, ``MOST_EDITS`` biases and blocked
    tokens, and log-probabilities of a number of tokens that ``TOP_LADDER`` reaches. ``penalties`` are the penalties of
    the rows (float32 ``[n, 3]``, see ``ops/penalties.py``), or None if no row has any. ``edits`` are the biases and
    blocks of ``adjusted`` rows, or None if there are none or too many. The other fields hold indices of rows:
    ``penalised`` those with penalties, ``processed`` those with logits processors, ``adjusted`` those with biases or ``min_new_tokens``, ``constrained`` those with
    a grammar, and ``logprobs`` those that request log-probabilities. ``top_logprobs`` is the largest number of most
    likely tokens that one of them requests, and ``scored`` (int64 ``[logprobs rows, m]``) the tokens of
    ``token_ids_logprob``, at the right end of each row; None if there are none. Settings with the same ``version`` are equal.
    """

    uids: tuple[int, ...]
    plain: bool
    simple: bool
    capturable: bool
    filters: Filters | None
    penalties: torch.Tensor | None
    edits: Edits | None
    seeds: np.ndarray[Any, np.dtype[np.int64]]
    penalised: tuple[int, ...]
    adjusted: tuple[int, ...]
    constrained: tuple[int, ...]
    logprobs: tuple[int, ...]
    top_logprobs: int
    scored: np.ndarray[Any, np.dtype[np.int64]] | None
    processed: tuple[int, ...]
    version: int

    @classmethod
    def of(
        cls, reqs: Sequence[AdmittedRequest], vocab_size: int, device: torch.device, ends: Sequence[int] = ()
    ) -> RowSettings:
        """Collect the settings of the requests in these rows. ``ends`` are the tokens that end any output."""
        params = [r.params for r in reqs]
        penalised = tuple(i for i, p in enumerate(params) if p.penalised)
        adjusted = tuple(i for i, p in enumerate(params) if p.logit_bias or p.min_new_tokens)
        constrained = tuple(i for i, r in enumerate(reqs) if r.constrained)
        logprobs = tuple(i for i, p in enumerate(params) if p.scores_output)
        top_logprobs = max((p.logprobs or 0 for p in params), default=0)
        greedy = all(p.greedy for p in params)
        processed = tuple(i for i, p in enumerate(params) if p.logits_processors)
        simple = not (penalised or adjusted or constrained or logprobs or processed)
        top = captured_top(top_logprobs)
        scored = _scored([params[i] for i in logprobs])
        edits = _edits(reqs, device, ends) if adjusted else None
        return cls(
            uids=tuple(r.uid for r in reqs),
            plain=greedy and simple,
            simple=simple,
            capturable=not (
                (adjusted and edits is None)
                or constrained
                or scored is not None
                or processed
                or (logprobs and (top is None or top > vocab_size))
            ),
            filters=None if greedy else _filters(reqs, vocab_size, device),
            penalties=_penalties(reqs, device) if penalised else None,
            edits=edits,
            seeds=np.array([r.seed for r in reqs], np.int64),
            penalised=penalised,
            adjusted=adjusted,
            constrained=constrained,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            scored=scored,
            processed=processed,
            version=next(_versions),
        )


def captured_top(top: int) -> int | None:
    """Return the smallest number of ``TOP_LADDER`` that is at least ``top``, or None if all are smaller."""
    return next((size for size in TOP_LADDER if size >= top), None)


def _edits(reqs: Sequence[AdmittedRequest], device: torch.device, ends: Sequence[int]) -> Edits | None:
    tokens = np.zeros((len(reqs), MOST_EDITS), np.int64)
    biases, until = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.int32)
    for row, req in enumerate(reqs):
        given = req.params.logit_bias or {}
        blocked = {*ends, *req.params.stop_token_ids} if req.params.min_new_tokens else set()
        ids = [*given, *(blocked - given.keys())]
        if len(ids) > MOST_EDITS:
            return None
        if ids:
            places = np.arange(MOST_EDITS) % len(ids)
            places[len(ids) :] = 0
            first = req.prompt_len + req.params.min_new_tokens
            tokens[row] = np.array(ids, np.int64)[places]
            biases[row] = np.array([given.get(token, 0.0) for token in ids], np.float32)[places]
            until[row] = np.array([first if token in blocked else 0 for token in ids], np.int32)[places]
    return Edits(*(to_device(column, device) for column in (tokens, biases, until)))


def _scored(params: Sequence[SamplingParams]) -> np.ndarray[Any, np.dtype[np.int64]] | None:
    """Return the tokens of ``token_ids_logprob`` of these params, at the right end of each row."""
    given = [p.token_ids_logprob or () for p in params]
    width = max(map(len, given), default=0)
    return np.array([(*[0] * (width - len(ids)), *ids) for ids in given], np.int64) if width else None


def _penalties(reqs: Sequence[AdmittedRequest], device: torch.device) -> torch.Tensor:
    params = [r.params for r in reqs]
    rows = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
    return to_device(np.array(rows, np.float32), device)


def _filters(reqs: Sequence[AdmittedRequest], vocab_size: int, device: torch.device) -> Filters:
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

"""Read the packed arrays of a step's result: tokens and log-probabilities of each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dovetail.types import HostLogprobs, IntArray, Req, StepResult


def tokens_of(result: StepResult) -> list[list[int]]:
    """Return the new tokens of each sampled row."""
    tokens = result.token_ids.tolist()
    if result.accept_lens is None:
        return tokens
    return [row[:count] for row, count in zip(tokens, result.accept_lens.tolist(), strict=True)]


def entries_of(tokens: IntArray, logprobs: HostLogprobs, given: int = 0) -> list[TokenLogprob]:
    """Return the log-probabilities of ``tokens [n]`` one by one. The last ``given`` columns are those of
    ``token_ids_logprob``."""
    chosen, top, ids = (column.tolist() for column in logprobs)
    return [
        _entry(token, chosen[i], ids[i], top[i], len(top[i]) - given, given) for i, token in enumerate(tokens.tolist())
    ]


def _entry(token: int, chosen: float, ids: list[int], values: list[float], top: int, given: int) -> TokenLogprob:
    """Return the log-probabilities at one position: ``top`` of the first columns, and the last ``given``."""
    pairs = tuple(zip(ids, values, strict=True))
    return TokenLogprob(token, chosen, pairs[:top], pairs[len(pairs) - given :])


def logprobs_of(result: StepResult, reqs: Sequence[Req], tokens: list[list[int]]) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of the ``tokens`` of each sampled row; an empty list if the row has none. ``reqs``
    are the requests of the sampled rows."""
    assert result.logprobs is not None
    chosen, top, ids = (column.tolist() for column in result.logprobs)
    nodes = None if result.nodes is None else result.nodes.tolist()
    rows: list[list[TokenLogprob]] = [[] for _ in tokens]
    for row, start in result.logprob_start.items():
        params = reqs[row].params
        count, given = params.logprobs or 0, len(params.token_ids_logprob or ())
        for j, token in enumerate(tokens[row]):
            i = start + (nodes[row][j] if nodes is not None else 0)
            rows[row].append(_entry(token, chosen[i], ids[i], top[i], count, given))
    return rows

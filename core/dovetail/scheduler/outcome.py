"""Give the results of a step to its requests: tokens, accepted drafts, log-probabilities and pooled vectors."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

import numpy as np

from dovetail.messages import TokenOutput
from dovetail.sampling_params import PoolingKind
from dovetail.scheduler.results import entries_of
from dovetail.scheduler.stopping import LENGTH, finish_reason
from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.constraints.requests import RequestConstraints
    from dovetail.scheduler.limits import SchedulerLimits, Totals
    from dovetail.types import FloatArray, HostLogprobs, IntArray, Req, StepPlan, TokenLogprob

log = logging.getLogger(__name__)


EARLIER_WEIGHT = 0.8
"""Set the weight of the earlier steps in the moving average of accepted drafts."""


def settle_drafts(
    plan: StepPlan, sampled: list[Req], tokens: list[list[int]], totals: Totals, limits: SchedulerLimits
) -> None:
    """Move the cursors of the ``sampled`` requests back over the drafts that were not accepted, and count the verified
    drafts. ``tokens`` are the new tokens of each. If the number of drafts adapts, set the number of drafts that each
    request gets next."""
    drafts = plan.drafts
    assert drafts is not None
    drafted = (drafts.lens[plan.samples] if plan.num_extend else drafts.lens).tolist()
    adapts = limits.adapts(drafts)
    totals.draft_steps += 1
    for req, count, new in zip(sampled, drafted, tokens, strict=True):
        if count == 0 or req.finish is not None:
            continue
        accepted = len(new) - 1
        req.cached_len -= count - accepted
        req.device_len -= count - accepted
        req.drafted += count
        req.verify_steps += 1
        totals.drafted_tokens += count
        totals.verify_steps += 1
        if adapts:
            _adapt(req, accepted, limits.draft_width)


def _adapt(req: Req, accepted: int, most: int) -> None:
    """Set the number of drafts of ``req`` to two more than twice the moving average of accepted drafts, at most
    ``most``. A request whose drafts are all accepted soon gets ``most`` drafts. A request whose drafts are all rejected
    still gets two, which cost little, so its number can grow again."""
    earlier = req.mean_accepted
    req.mean_accepted = accepted if earlier < 0 else EARLIER_WEIGHT * earlier + (1 - EARLIER_WEIGHT) * accepted
    req.draft_len = min(most, 2 + math.ceil(2 * req.mean_accepted))


def take_tokens(
    req: Req,
    tokens: list[int],
    logprobs: list[TokenLogprob] | None,
    eos_token_ids: frozenset[int],
    totals: Totals,
    jump: Callable[[Req], list[int]] | None = None,
) -> TokenOutput:
    """Append ``tokens`` to the request and return the answer for its client.

    If a token ends the request, ``req.finish`` is set and the tokens after it are dropped. If the request goes on,
    ``jump`` may append forced tokens, which it returns. All appended tokens that were sampled, except one, are counted
    as accepted drafts.
    """
    before, several = req.known_len, len(tokens) > 1
    if several and _goes_on(req, tokens, eos_token_ids):
        req.known_len += len(tokens)
        req.token_ids[before : req.known_len] = tokens
    else:
        _take_singly(req, tokens, eos_token_ids)
    if several:
        accepted = req.known_len - before - 1
        req.accepted += accepted
        totals.accepted_tokens += accepted
    if jump is not None and req.finish is None:
        tokens = tokens + jump(req)
    return _output(req, tokens, before, logprobs)


def prefilled(plan: StepPlan, reqs: list[Req]) -> list[Req]:
    """Return the requests of a step that generate no tokens and whose last prompt token the step has computed. ``reqs``
    are the requests of its rows."""
    ends = plan.prefix_lens + plan.extend_lens
    return [
        req
        for row, req in enumerate(reqs[: plan.num_extend])
        if req.prefill_only and req.finish is None and ends[row] == req.prompt_len
    ]


def end_prefilled(req: Req) -> TokenOutput:
    """End a request that generates no tokens and whose prompt has been computed. Return the answer for its client."""
    req.finish = LENGTH if req.error is None else FinishReason(FinishKind.ERROR, message=req.error)
    return _output(req, [], req.prompt_len, [])


def aborted(req: Req) -> TokenOutput:
    """Return the answer for the client of a request that was aborted."""
    return TokenOutput(
        req.rid,
        [],
        req.finish,
        req.prompt_len,
        req.known_len - req.prompt_len,
        req.prefix_hit_len,
        queue_seconds=req.queue_seconds,
        compile_seconds=req.compile_seconds,
    )


def _output(req: Req, tokens: list[int], before: int, logprobs: list[TokenLogprob] | None) -> TokenOutput:
    """Return the answer with the tokens that were appended since the request had ``before`` tokens."""
    known, prompt_len, params = req.known_len, req.prompt_len, req.params
    count, first = known - before, before == prompt_len
    return TokenOutput(
        req.rid,
        tokens if count == len(tokens) else tokens[:count],
        req.finish,
        prompt_len,
        known - prompt_len,
        req.prefix_hit_len,
        logprobs[:count] if logprobs is not None and params.scores_output else None,
        req.prompt_logprobs if first and params.prompt_logprobs is not None else None,
        req.drafted,
        req.accepted,
        req.grammar_backend,
        req.verify_steps,
        pooled_bytes(req) if params.pooling is not None else None,
        req.queue_seconds if first else None,
        req.compile_seconds if first else None,
        req.prefix_reached if first else (),
    )


def _take_singly(req: Req, tokens: list[int], eos_token_ids: frozenset[int]) -> None:
    for token in tokens:
        req.token_ids[req.known_len] = token
        req.known_len += 1
        try:
            finish = finish_reason(req, token, eos_token_ids)
        except Exception as error:  # raised by the request's matcher or detokenizer: it ends this request only
            finish = _failure(req, f"token {token}", error)
        if finish is not None:
            req.finish = finish
            break


def _goes_on(req: Req, tokens: list[int], eos_token_ids: frozenset[int]) -> bool:
    """Return True if none of ``tokens`` can end the request, and neither a matcher nor a detokenizer needs them one by
    one."""
    return (
        req.matcher is None
        and req.detokenizer is None
        and req.error is None
        and req.known_len + len(tokens) < len(req.token_ids)
        and eos_token_ids.isdisjoint(tokens)
        and (not req.params.stop_token_ids or set(tokens).isdisjoint(req.params.stop_token_ids))
    )


def take_forced(req: Req, tokens: list[int], eos_token_ids: frozenset[int]) -> list[int]:
    """Append tokens that the constraint forces, up to the one that ends the request or that the matcher refuses. Return
    the appended tokens."""
    before = req.known_len
    for token in tokens:
        try:
            if not req.matcher.accept(token):
                break
            req.token_ids[req.known_len] = token
            req.known_len += 1
            req.finish = finish_reason(req, token, eos_token_ids, accepted=True)
        except Exception as error:
            req.finish = _failure(req, f"token {token}", error)
        if req.finish is not None:
            break
    return tokens[: req.known_len - before]


def _failure(req: Req, what: str, error: Exception) -> FinishReason:
    log.error("request %s could not take %s", req.rid, what, exc_info=error)
    return FinishReason(FinishKind.ERROR, message=f"{what}: {type(error).__name__}: {error}")


def forced_tokens(req: Req, constraints: RequestConstraints) -> list[int]:
    """Return the tokens that the constraint of ``req`` forces next. A matcher that raises ends its request."""
    try:
        return constraints.forced_tokens(req)
    except Exception as error:
        req.finish = _failure(req, "jump-forward", error)
        return []


def add_prompt_logprobs(req: Req, start: int, tokens: IntArray, logprobs: HostLogprobs) -> None:
    """Add the log-probabilities of ``tokens``, which a chunk of the prompt that begins at ``start`` has scored.

    The first of them belongs to the token at ``start + 1``, or to the first token for which the client requested
    log-probabilities if that comes later. Entries that a retracted request computes again are dropped.
    """
    scored = prompt_scored(req)
    params = req.params
    fresh = entries_of(tokens, logprobs, len(params.token_ids_logprob or ()))[
        scored - max(start + 1, params.prompt_logprobs_start) :
    ]
    req.prompt_logprobs.extend(fresh[: req.prompt_len - scored])


def prompt_scored(req: Req) -> int:
    """Return the index of the first prompt token whose log-probability is requested and not yet known."""
    return req.params.prompt_logprobs_start + len(req.prompt_logprobs)


def add_pooled(req: Req, start: int, vector: FloatArray) -> None:
    """Add the vector of a chunk of the prompt that begins at ``start`` to ``req.pooled``. For a mean, the sums of the
    chunks are added up, and a retracted request begins again at its first chunk. For other kinds, the vector replaces
    the earlier one."""
    pooling = req.params.pooling
    assert pooling is not None
    fresh = not pooling.reads_all or start == 0
    req.pooled = vector.astype(np.float64) if fresh else req.pooled + vector


def pooled_bytes(req: Req) -> bytes | None:
    """Return the pooled vector of the whole prompt as little-endian float32 bytes; None if no pooling was requested."""
    pooling = req.params.pooling
    if pooling is None or req.pooled is None:
        return None
    whole = req.pooled / req.prompt_len if pooling.kind is PoolingKind.MEAN else req.pooled
    return whole.astype("<f4").tobytes()

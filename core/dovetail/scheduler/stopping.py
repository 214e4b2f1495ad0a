"""Decide when a request is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.types import Req

LENGTH = FinishReason(FinishKind.LENGTH)
"""Give the finish reason of a request that has reached its maximum length."""


def finish_reason(
    req: Req, token_id: int, eos_token_ids: frozenset[int], *, accepted: bool = False
) -> FinishReason | None:
    """Return the reason why the request ends with ``token_id``, or None if it goes on. ``token_id`` is its newest
    token, which is in ``req.token_ids`` already.

    Advances the detokenizer that finds stop strings and, unless it has ``accepted`` the token before, the matcher.
    """
    if req.error is not None:
        return FinishReason(FinishKind.ERROR, message=req.error)
    params, known, matcher = req.params, req.known_len, req.matcher
    if matcher is not None:
        if not accepted and not matcher.accept(token_id):
            return FinishReason(FinishKind.ERROR, message=_unmasked(req, token_id))
        if matcher.is_terminated:
            return FinishReason(FinishKind.STOP, token_id if token_id in eos_token_ids else None)
    stops = (token_id in eos_token_ids and not params.ignore_eos) or token_id in params.stop_token_ids
    if stops and known - req.prompt_len >= params.min_new_tokens:
        return FinishReason(FinishKind.STOP, token_id)
    if req.detokenizer is not None:
        req.detokenizer.push([token_id])
        if req.detokenizer.matched is not None:
            return FinishReason(FinishKind.STOP, req.detokenizer.matched)
    return LENGTH if known >= len(req.token_ids) else None


def _unmasked(req: Req, token_id: int) -> str:
    return (
        f"grammar backend {req.grammar_backend} refuses token {token_id}, although its mask allows it. "
        "This is a defect of the backend; try again, or name another grammar_backend"
    )

"""Decide when a request is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.types import FinishKind, FinishReason

if TYPE_CHECKING:
    from dovetail.types import Req

LENGTH = FinishReason(FinishKind.LENGTH)
"""Give the finish reason of a request that has reached its maximum length."""


def finish_reason(req: Req, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Return the reason why the request ends with ``token_id``, or None if it goes on. ``token_id`` is its newest
    token, which is in ``req.token_ids`` already.

    Advances the request's matcher and the detokenizer that finds its stop strings.
    """
    if req.error is not None:
        return FinishReason(FinishKind.ERROR, message=req.error)
    if req.matcher is not None and not req.matcher.accept(token_id):
        return FinishReason(FinishKind.ERROR, message=_unmasked(req, token_id))
    return end_of(req, token_id, eos_token_ids)


def end_of(req: Req, token_id: int, eos_token_ids: frozenset[int]) -> FinishReason | None:
    """Return the ``finish_reason`` of a token that the matcher has already accepted."""
    params = req.params
    if req.matcher is not None and req.matcher.is_terminated:
        return FinishReason(FinishKind.STOP, token_id if token_id in eos_token_ids else None)
    if req.known_len - req.prompt_len >= params.min_new_tokens and (
        token_id in params.stop_token_ids or (not params.ignore_eos and token_id in eos_token_ids)
    ):
        return FinishReason(FinishKind.STOP, token_id)
    if req.detokenizer is not None:
        req.detokenizer.push([token_id])
        if req.detokenizer.matched is not None:
            return FinishReason(FinishKind.STOP, req.detokenizer.matched)
    return LENGTH if req.known_len >= len(req.token_ids) else None


def _unmasked(req: Req, token_id: int) -> str:
    return (
        f"grammar backend {req.grammar_backend} refuses token {token_id}, although its mask allows it. "
        "This is a defect of the backend; try again, or name another grammar_backend"
    )

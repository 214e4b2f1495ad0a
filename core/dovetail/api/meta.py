"""Format the ``meta_info`` of an output as SGLang does, for /generate and for the calls of programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.interfaces.cache_groups import limiting_group
from dovetail.types import FinishKind, FinishReason, TokenLogprob


def finish_json(finish: FinishReason | None, count: int) -> dict[str, Any] | None:
    """Return the reason why an output of ``count`` tokens ended, in SGLang's form, or None if it has not ended."""
    if finish is None:
        return None
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": count}
    if finish.kind is FinishKind.STOP:
        return {"type": "stop"} if finish.matched is None else {"type": "stop", "matched": finish.matched}
    return {"type": finish.kind.value, "message": finish.message}


def cached_json(cached: int, groups: Sequence[int]) -> dict[str, Any]:
    """Return where the ``cached`` prompt tokens were found, in SGLang's form: on the device, because no prefix cache of this
    server keeps KV elsewhere. If the model has several cache groups, ``groups`` are the prompt tokens that each group alone
    had, in the order of ``cache_groups`` in /server_info; ``limited_by`` is the index of the group that had the fewest, if
    another one had more."""
    details: dict[str, Any] = {"device": cached, "host": 0}
    if groups:
        details["groups"] = list(groups)
        if (limiting := limiting_group(groups)) is not None:
            details["limited_by"] = limiting
    return details


def logprobs_json(
    entries: Sequence[TokenLogprob], name: str, top: bool, text: Callable[[int], str | None], given: bool = False
) -> dict[str, Any]:
    """Return ``[logprob, token id, text]`` of each token and, with ``top``, of the most likely tokens at its position;
    with ``given``, those of the tokens that the request names (``token_ids_logprob``). ``name`` is ``input`` or ``output``."""
    shown: dict[str, Any] = {f"{name}_token_logprobs": [[e.logprob, e.token_id, text(e.token_id)] for e in entries]}
    if top:
        shown[f"{name}_top_logprobs"] = [
            None if e.logprob is None else [[value, token, text(token)] for token, value in e.top] for e in entries
        ]
    if given:
        shown[f"{name}_token_ids_logprobs"] = [
            None if e.logprob is None else [[value, token, text(token)] for token, value in e.given] for e in entries
        ]
    return shown

"""A call's sampling in the terms of this engine, and what it answers in the terms of its native API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.lang.ir import Sampling
from dovetail.types import FinishKind, FinishReason, GrammarKind, GrammarSpec, SamplingParams, TokenLogprob

CONSTRAINTS = frozenset({"regex", "json_schema"})
"""The constraints that a call may have."""

_SAME = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "ignore_eos", "seed", "n")


def sampling_params(sampling: Sampling) -> SamplingParams:
    """``SamplingParams`` of a call. Raises ``RequestError``."""
    given = sampling.given()
    values: dict[str, Any] = {name: given[name] for name in _SAME if name in given}
    values |= {
        "max_new_tokens": given.get("max_tokens"),
        "min_new_tokens": given.get("min_tokens", 0),
        "stop": given.get("stop", ()),
        "stop_token_ids": given.get("stop_token_ids", ()),
        "grammar": _grammar(sampling),
    }
    if given.get("return_logprob"):
        values["logprobs"] = given.get("top_logprobs_num", 0)
        if given.get("logprob_start_len", -1) >= 0:
            values["prompt_logprobs"] = given.get("top_logprobs_num", 0)
            values["prompt_logprobs_start"] = given["logprob_start_len"]
    return SamplingParams(**values)


def native_params(sampling: Sampling) -> dict[str, Any]:
    """``sampling_params`` of the native API."""
    given = sampling.given()
    values = {name: given[name] for name in (*_SAME, "stop", "stop_token_ids") if name in given}
    for ours, theirs in (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens")):
        if ours in given:
            values[theirs] = given[ours]
    if sampling.constraint is not None:
        kind, text = sampling.constraint
        values[kind] = text
    return values


def finish_shown(finish: FinishReason | None, count: int) -> dict[str, Any] | None:
    """Why an output of ``count`` tokens ended, as the native API says it."""
    if finish is None:
        return None
    if finish.kind is FinishKind.LENGTH:
        return {"type": "length", "length": count}
    if finish.kind is FinishKind.STOP:
        return {"type": "stop"} if finish.matched is None else {"type": "stop", "matched": finish.matched}
    return {"type": finish.kind.value, "message": finish.message}


def logprobs_shown(
    entries: Sequence[TokenLogprob], name: str, top: bool, text: Callable[[int], str | None]
) -> dict[str, Any]:
    """``[logprob, token id, text]`` of each token, and of the likeliest at its place."""
    shown: dict[str, Any] = {f"{name}_token_logprobs": [[e.logprob, e.token_id, text(e.token_id)] for e in entries]}
    if top:
        shown[f"{name}_top_logprobs"] = [
            None if e.logprob is None else [[value, token, text(token)] for token, value in e.top] for e in entries
        ]
    return shown


def _grammar(sampling: Sampling) -> GrammarSpec | None:
    if sampling.constraint is None:
        return None
    kind, text = sampling.constraint
    return GrammarSpec(GrammarKind(kind), text)

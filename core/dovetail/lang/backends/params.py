"""Convert a call's sampling options to the parameters of this engine and of its native API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.lang.ir import SamplingOptions
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

CONSTRAINTS = frozenset({"regex", "json_schema"})
"""The kinds of constraints that a call may have."""

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "seed",
    "n",
)


def sampling_params(sampling: SamplingOptions, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the ``SamplingParams`` of a call, with ``defaults`` for what it does not set. Raises ``RequestError``."""
    given = {**defaults, **sampling.given()}
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


def native_params(sampling: SamplingOptions) -> dict[str, Any]:
    """Return the ``sampling_params`` of the native API."""
    given = sampling.given()
    values = {name: given[name] for name in (*_SAME, "stop", "stop_token_ids") if name in given}
    for ours, theirs in (("max_tokens", "max_new_tokens"), ("min_tokens", "min_new_tokens")):
        if ours in given:
            values[theirs] = given[ours]
    if sampling.constraint is not None:
        kind, text = sampling.constraint
        values[kind] = text
    return values


def _grammar(sampling: SamplingOptions) -> GrammarSpec | None:
    if sampling.constraint is None:
        return None
    kind, text = sampling.constraint
    return GrammarSpec(GrammarKind(kind), text)

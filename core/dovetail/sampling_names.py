"""Translate the names that vLLM and SGLang give to sampling parameters."""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dovetail.errors import RequestError

T = TypeVar("T")

OTHER_NAMES: Mapping[str, str] = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "include_stop",
    "no_stop_trim": "include_stop",
    "stop_strings": "stop",
    "sampling_seed": "seed",
    "thinking_token_budget": "thinking_budget",
}
"""Map names of vLLM and SGLang to the names of ``SamplingParams``. Names that are the same everywhere are not listed."""

UNUSED: Mapping[str, Any] = {
    "detokenize": True,
    "spaces_between_special_tokens": True,
    "best_of": 1,
    "stream_interval": 1,
}
"""Parameters of vLLM and SGLang that are accepted with this value, which asks for nothing. Others are refused."""

MAX_PROCESSORS = 8
"""Limit the number of logits processors of a request."""

_LONGEST_PARAMS = 65536


@dataclass(frozen=True, slots=True)
class LogitsProcessorCall:
    """Name a logits processor, with the parameters that the request gives to it, as the JSON text of an object."""

    name: str
    params: str = "{}"


_LISTS = ("stop", "stop_regex", "stop_token_ids", "bad_words", "allowed_token_ids", "token_ids_logprob")


def own_names(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return ``given`` by the names ``known``, with tuples in place of lists and of single strings. Raises
    ``RequestError`` for names that are given twice, that mean nothing, or that are not supported."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        own = OTHER_NAMES.get(name, name)
        if own in found:
            raise RequestError(f"{own} is given twice, as {_others(own, given)}; keep one", param=name)
        if own in known:
            found[own] = _tuple(own, value)
        elif name in UNUSED:
            if value is not None and value != UNUSED[name]:
                raise RequestError(f"{name} is {value!r:.80}; allowed: {UNUSED[name]!r}, its default", param=name)
        else:
            raise RequestError(_unknown(name, known), param=name, code="unknown_parameter")
    return found


def _others(own: str, given: Mapping[str, Any]) -> str:
    return " and ".join(name for name in given if OTHER_NAMES.get(name, name) == own)


def _unknown(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, [*known, *OTHER_NAMES], n=1, cutoff=0.6)
    meant = f". Is {close[0]} meant?" if close else ";"
    return f"there is no sampling parameter {name!r:.80}{meant} allowed: {', '.join(sorted(known))}"


def _tuple(name: str, value: Any) -> Any:
    """Return the value of a parameter that holds several values as a tuple. None stands for its default."""
    if name == "logits_processors":
        return tuple(map(_call, value)) if isinstance(value, list | tuple) else () if value is None else value
    if name not in _LISTS:
        return value
    if value is None:
        return None if name in ("allowed_token_ids", "token_ids_logprob") else ()
    return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value


def _call(given: object) -> object:
    """Return the call of a logits processor that a mapping describes: its name and its parameters."""
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        return given
    params = {name: value for name, value in given.items() if name != "name"}
    try:
        text = json.dumps(params, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(
            f"logits_processors: the parameters of {given['name']!r:.80} are no JSON: {error}",
            param="logits_processors",
        ) from None
    if len(text) > _LONGEST_PARAMS:
        raise RequestError(
            f"logits_processors: the parameters of {given['name']!r:.80} have {len(text)} characters; allowed: "
            f"{_LONGEST_PARAMS}",
            param="logits_processors",
        )
    return LogitsProcessorCall(given["name"], text)


def accepts_other_names(cls: type[T]) -> type[T]:
    """Let the constructor of a dataclass take its fields by the names of vLLM and SGLang too, and lists for tuples."""
    make: Callable[..., None] = cls.__init__
    known = frozenset(cls.__dataclass_fields__)  # pyright: ignore[reportAttributeAccessIssue]

    @functools.wraps(make)
    def init(self: T, *args: Any, **given: Any) -> None:
        make(self, *args, **own_names(given, known))

    cls.__init__ = init
    return cls

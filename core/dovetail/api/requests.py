"""What the request bodies of most APIs have in common: ids, sampling parameters, constraints."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from dovetail.errors import GrammarError, RequestError
from dovetail.interfaces.api import ApiHost
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

CONSTRAINTS = ("json_schema", "regex", "ebnf", "lark", "choice", "structural_tag")
"""The request fields that each hold one constraint, which every API has."""

_LONGEST_ID = 100
"""Digits of a token id; Python refuses to read a few thousand."""


def new_id(prefix: str) -> str:
    """A public id for a request without one of its own."""
    return prefix + secrets.token_hex(12)


def check_count(host: ApiHost, count: int, param: str) -> None:
    """Before the texts of ``param`` become tokens: raises ``RequestError`` where there are more than may wait."""
    most = host.config.scheduler.max_waiting
    if count > most:
        raise RequestError(f"{param} has {count} entries; at most {most} may wait", param=param)


def grammar_of(given: Mapping[str, Any], backend: str | None = None) -> GrammarSpec | None:
    """The constraint among the fields ``CONSTRAINTS`` and ``response_format``, for ``backend``; None where all are None.
    Raises ``RequestError`` for more than one, and for a backend without one."""
    asked = {name: value for name, value in given.items() if value is not None}
    if len(asked) > 1:
        raise RequestError(f"only one constraint can hold; given: {', '.join(asked)}", param=list(asked)[1])
    if backend is not None and not asked:
        raise RequestError(
            f"grammar_backend is {backend!r:.80} and there is no constraint; give one of {', '.join(given)}",
            param="grammar_backend",
        )
    for name, value in asked.items():
        spec = _response_format(value) if name == "response_format" else _constraint(name, value)
        return spec and dataclasses.replace(spec, backend=backend)
    return None


def _constraint(name: str, value: Any) -> GrammarSpec:
    match name:
        case "json_schema":
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema_text(value, name))
        case "structural_tag":
            return structural_tag(value, name)
        case "choice":
            return choice_of(value, name)
    if not value:
        raise GrammarError(f"{name} is empty", param=name)
    return GrammarSpec(GrammarKind(name), value)


def choice_of(texts: Sequence[str], param: str) -> GrammarSpec:
    """One of ``texts``, each once. Raises ``GrammarError`` where there is none, or an empty one."""
    if not (texts and all(texts)):
        raise GrammarError(
            f"{param} has no text to choose, or an empty one; give texts that are not empty", param=param
        )
    return GrammarSpec(GrammarKind.CHOICE, msgspec.json.encode(list(dict.fromkeys(texts))).decode())


_TAG_SHAPE = '{"structures": [{"begin": text, "schema": object, "end": text}, ...], "triggers": [text, ...]}'


def structural_tag(value: object, param: str) -> GrammarSpec:
    """Free text with tagged parts that have schemas (``GrammarSpec``). ``value`` is the object, or its text. Raises
    ``GrammarError``."""
    tag = _decoded(value, param)
    if not (isinstance(tag, dict) and _is_tag(tag)):
        raise GrammarError(f"{param} is {tag!r:.80}; allowed: {_TAG_SHAPE}", param=param)
    structures, triggers = tag["structures"], tag["triggers"]
    for structure in structures:
        if not any(structure["begin"].startswith(trigger) for trigger in triggers):
            begin = structure["begin"]
            raise GrammarError(f"{param}: no trigger begins {begin!r:.80}, so it could never be entered", param=param)
    text = msgspec.json.encode({"structures": structures, "triggers": triggers}).decode()
    return GrammarSpec(GrammarKind.STRUCTURAL_TAG, text)


def _is_tag(tag: dict[str, Any]) -> bool:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    return (
        tag.keys() <= {"type", "structures", "triggers"}
        and isinstance(structures, list)
        and isinstance(triggers, list)
        and bool(structures)
        and all(isinstance(trigger, str) and trigger for trigger in triggers)
        and all(isinstance(one, dict) and one.keys() == {"begin", "schema", "end"} for one in structures)
        and all(isinstance(one["begin"], str) and isinstance(one["end"], str) for one in structures)
        and all(isinstance(one["schema"], dict | bool) for one in structures)
    )


def _response_format(value: Mapping[str, Any]) -> GrammarSpec | None:
    param = "response_format"
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case "json_schema":
            described = value.get("json_schema")
            if not isinstance(described, dict) or "schema" not in described:
                raise RequestError("response_format.json_schema needs an object with a schema", param=param)
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema_text(described["schema"], param))
        case "structural_tag":
            return structural_tag(dict(value), param)
    allowed = "text, json_object, json_schema, structural_tag"
    raise RequestError(f"response_format.type is {value.get('type')!r}; allowed: {allowed}", param=param)


def _schema_text(schema: object, param: str) -> str:
    """The schema as JSON with its keys in the order given, which is the order of the output's."""
    schema = _decoded(schema, param)
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{param} is {schema!r:.80}; allowed: a JSON schema, which is an object", param=param)
    return msgspec.json.encode(schema).decode()


def _decoded(value: object, param: str) -> object:
    """``value``, read as JSON if it is a text. Raises ``GrammarError``."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"{param} is not valid JSON: {error}", param=param) from error


def sampling_params(given: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """``SamplingParams`` of the values that are not None. ``names`` maps its fields to the API's names, for errors.
    Raises ``RequestError``."""
    try:
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except RequestError as error:
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise RequestError(message, param=names.get(error.param or "", error.param), code=error.code) from None


def with_room(params: SamplingParams, default: int) -> SamplingParams:
    """``params`` with ``max_new_tokens`` set: its own, else ``default`` (at least ``min_new_tokens``)."""
    if params.max_new_tokens is not None:
        return params
    return dataclasses.replace(params, max_new_tokens=max(default, params.min_new_tokens))


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """One stop string, several, or none."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def token_biases(logit_bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON has strings as keys; token ids are integers. Raises ``RequestError``."""
    if logit_bias is None:
        return None
    for key in logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID):
            raise RequestError(f"logit_bias has key {key!r:.80}; allowed: token ids", param="logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}

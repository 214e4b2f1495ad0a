"""Read the fields that the request bodies of most APIs have in common: ids, sampling parameters, constraints."""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from dovetail.errors import GrammarError, RequestError
from dovetail.interfaces.api import ApiHost
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams

CONSTRAINTS = ("json_schema", "regex", "ebnf", "lark", "choice", "structural_tag")
"""List the request fields that each hold one constraint. Every API has them."""

_MEANING = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structured_outputs.json": "json_schema",
    "structured_outputs.regex": "regex",
    "structured_outputs.choice": "choice",
    "structured_outputs.grammar": "grammar",
    "structured_outputs.json_object": "json_object",
    "structured_outputs.structural_tag": "structural_tag",
}
"""Map vLLM's names of constraints to those in ``CONSTRAINTS``. A ``grammar`` is ``ebnf`` or ``lark``."""

_REFUSED_OPTIONS = {
    "disable_any_whitespace": "max_whitespace in the section grammar of the server's config limits white space",
    "disable_additional_properties": "write additionalProperties: false into the objects of the schema",
    "whitespace_pattern": "write it into the constraint as a regex or a grammar",
    "disable_fallback": "name the backend in grammar_backend; no other is then used",
}
"""Map options of vLLM's ``structured_outputs`` to what to use instead."""

_LONGEST_ID = 100
"""Limit the number of digits of a token id. Python refuses to convert several thousand digits."""


def new_id(prefix: str) -> str:
    """Return a public id for a request that gives none."""
    return prefix + secrets.token_hex(12)


def request_names(given: str | Sequence[str] | None, count: int, prefix: str) -> tuple[str, list[str]]:
    """Return the public id of a request, and those of its ``count`` prompts: as ``given``, or new ones that begin with
    ``prefix``. The ids of prompts are empty if they have none of their own. Raises ``RequestError``."""
    if given is None or isinstance(given, str):
        return given or new_id(prefix), [""] * count
    if len(given) != count:
        raise RequestError(f"rid has {len(given)} ids for {count} prompts; give one for each", param="rid")
    if len(set(given)) != count:
        raise RequestError("rid has an id twice; give each prompt its own", param="rid")
    return (given[0], [""]) if count == 1 else (new_id(prefix), list(given))


def check_logprobs(host: ApiHost, params: SamplingParams, names: Mapping[str, str] = {}) -> None:
    """Raise ``RequestError`` if ``params`` request more log-probabilities at each position than the server permits.
    ``names`` are the names of the fields in the API."""
    most = host.config.server.max_logprobs
    for field in ("logprobs", "prompt_logprobs"):
        value: int | None = getattr(params, field)
        if value is not None and value > most:
            name = names.get(field, field)
            raise RequestError(f"{name} is {value}; allowed: at most {most} (server.max_logprobs)", param=name)


ID_BYTES = 7
"""The JSON of a token id in a list, in bytes."""


def check_count(host: ApiHost, count: int, param: str) -> None:
    """Raise ``RequestError`` if ``param`` has more texts than the number of requests that may wait. Called before the
    texts are tokenized."""
    most = host.config.scheduler.max_waiting
    if count > most:
        raise RequestError(f"{param} has {count} entries; at most {most} may wait", param=param)


def grammar_of(given: Mapping[str, Any], backend: str | None = None) -> GrammarSpec | None:
    """Return the constraint in ``given``, which maps the fields ``CONSTRAINTS``, ``response_format`` and vLLM's fields
    for constraints to their values, with ``backend`` as its backend. Return None if all values are None. Raises ``RequestError`` for several
    constraints, and for a backend without a constraint."""
    constraints = {name: value for name, value in given.items() if value is not None}
    if len(constraints) > 1:
        raise RequestError(
            f"a request can have only one constraint; given: {', '.join(constraints)}", param=list(constraints)[1]
        )
    if backend is not None and not constraints:
        raise RequestError(
            f"grammar_backend is {backend!r:.80}, but there is no constraint; give one of {', '.join(given)}",
            param="grammar_backend",
        )
    for name, value in constraints.items():
        spec = _response_format(value) if name == "response_format" else _constraint(name, value)
        return spec and dataclasses.replace(spec, backend=backend, param=name)
    return None


def without_options(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's ``structured_outputs`` without its options. Raises ``RequestError`` for an option that is neither None
    nor False."""
    for name, instead in _REFUSED_OPTIONS.items():
        if (value := outputs.get(name)) is not None and value is not False:
            field = f"structured_outputs.{name}"
            raise RequestError(
                f"{field} is not supported by this server: {instead}", param=field, code="unsupported_parameter"
            )
    return {name: value for name, value in outputs.items() if name not in _REFUSED_OPTIONS}


def _constraint(name: str, value: Any) -> GrammarSpec:
    kind = _MEANING.get(name, name)
    match kind:
        case "json_object":
            return GrammarSpec(GrammarKind.JSON_OBJECT)
        case "json_schema":
            return GrammarSpec(GrammarKind.JSON_SCHEMA, _schema_text(value, name))
        case "structural_tag":
            return structural_tag(value, name)
        case "choice":
            return choice_of(value, name)
    if not value:
        raise GrammarError(f"{name} is empty", param=name)
    if kind == "grammar":
        kind = GrammarKind.EBNF if "::=" in value else GrammarKind.LARK
    return GrammarSpec(GrammarKind(kind), value)


def choice_of(texts: Sequence[str], param: str) -> GrammarSpec:
    """Return the constraint that the output is one of ``texts``. Raises ``GrammarError`` if there is no text, or an
    empty one."""
    if not (texts and all(texts)):
        raise GrammarError(
            f"{param} has no text or an empty text; give at least one text, none of them empty", param=param
        )
    return GrammarSpec(GrammarKind.CHOICE, msgspec.json.encode(list(dict.fromkeys(texts))).decode())


_TAG_SHAPE = '{"structures": [{"begin": text, "schema": object, "end": text}, ...], "triggers": [text, ...]}'


def structural_tag(value: object, param: str) -> GrammarSpec:
    """Return the constraint for free text with tagged parts that have schemas (``GrammarSpec``). ``value`` is the
    object or its JSON text. Raises ``GrammarError``."""
    tag = _decoded(value, param)
    if not (isinstance(tag, dict) and _is_tag(tag)):
        raise GrammarError(f"{param} is {tag!r:.80}; allowed: {_TAG_SHAPE}", param=param)
    structures, triggers = tag["structures"], tag["triggers"]
    for structure in structures:
        if not any(structure["begin"].startswith(trigger) for trigger in triggers):
            begin = structure["begin"]
            raise GrammarError(
                f"{param}: no trigger is the beginning of {begin!r:.80}, so that structure could never start",
                param=param,
            )
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
    """Return the schema as JSON. Its keys keep their order, which is the order of the keys in the output."""
    schema = _decoded(schema, param)
    if not isinstance(schema, dict | bool):
        raise GrammarError(f"{param} is {schema!r:.80}; allowed: a JSON schema, which is an object", param=param)
    return msgspec.json.encode(schema).decode()


def _decoded(value: object, param: str) -> object:
    """Return ``value``, decoded from JSON if it is a text. Raises ``GrammarError``."""
    if not isinstance(value, str):
        return value
    try:
        return msgspec.json.decode(value)
    except (msgspec.DecodeError, RecursionError) as error:
        raise GrammarError(f"{param} is not valid JSON: {error}", param=param) from error


def sampling_params(
    given: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any] = {}
) -> SamplingParams:
    """Return ``SamplingParams`` with the values that are not None, and with those of ``defaults`` (normally
    ``ApiHost.sampling_defaults``) for the others. ``names`` maps their fields to the names of the API, for error
    messages. Raises ``RequestError``."""
    with api_names(names):
        return SamplingParams(**{**defaults, **{name: value for name, value in given.items() if value is not None}})


@contextmanager
def api_names(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors of the block name fields as the API does. ``names`` maps the fields of ``SamplingParams`` to the names
    of the API."""
    try:
        yield
    except RequestError as error:
        if type(error) is not RequestError:  # an error of its own kind, whose status may differ
            raise
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        raise RequestError(message, param=names.get(error.param or "", error.param), code=error.code) from None


@contextmanager
def prompt_in(field: str) -> Iterator[None]:
    """Let errors of the block about the prompt name ``field``, the request field that holds it."""
    try:
        yield
    except RequestError as error:
        if error.param == "prompt":
            error.param = field
        raise


def with_output_limit(params: SamplingParams, default: int) -> SamplingParams:
    """Return ``params`` with ``max_new_tokens`` set: to its own value, else to ``default`` (at least
    ``min_new_tokens``)."""
    if params.max_new_tokens is not None:
        return params
    return dataclasses.replace(params, max_new_tokens=max(default, params.min_new_tokens))


def stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings of a field that holds one, several, or none."""
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def token_biases(logit_bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """Return the biases by token id. JSON keys are strings, so they are converted. Raises ``RequestError``."""
    if logit_bias is None:
        return None
    for key in logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) <= _LONGEST_ID):
            raise RequestError(f"logit_bias has key {key!r:.80}; allowed: token ids", param="logit_bias")
    return {int(key): bias for key, bias in logit_bias.items()}

"""Read and validate request bodies. Every mistake in a body becomes one clear ``RequestError``."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Container, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
import numpy as np
from pydantic import ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, ErrorDetails, core_schema
from starlette.exceptions import HTTPException
from starlette.requests import Request

from dovetail.api.offload import HeldBytes, offloaded, request_scope
from dovetail.bounded import Bounded
from dovetail.errors import RequestError

_SHOWN = 80
_COUNTED_AT_ONCE = 1 << 20

MAX_DEPTH = 128
"""Limit the nesting of arrays and objects in a body. Deeper values would exhaust the stack of the code that walks them
later: copies, chat templates, encoders."""

BODY_SECONDS = 60.0
"""Limit the time, in seconds, in which a body must arrive, outside of a server (``server.limits.body_seconds``). Without
a limit, a client that sends a byte now and then would hold its connection forever."""

LARGE = 1 << 16
"""Decode bodies of more than this number of bytes on a thread, where tenants take turns."""

MAX_CONTAINERS = 1 << 16
"""Limit the number of arrays and objects in a body. Each becomes an object of Python; several hundred thousand of them,
which fit into a few megabytes, would take seconds from all other requests."""

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""Declare a count or a rank. Larger numbers cannot be sent to the engine."""

Rid = Annotated[str, Field(min_length=1, max_length=256)]
"""Declare the public id of a request. Every event of its stream repeats it."""

Rids = Annotated[list[Rid], Field(min_length=1, max_length=4096)]
"""Declare the public ids of the prompts of a request."""

CacheSalt = Annotated[
    Annotated[str, Field(max_length=1024)] | None,
    Field(description="Requests share cached prefixes only with requests that have the same salt."),
]
"""Declare the name of a namespace. It is stored while prefixes of the namespace are cached."""

Session = Annotated[
    Rid | None,
    Field(description="The text of the last request of a session stays cached for the next one, for a limited time."),
]
"""Declare the name of a session, such as a chat."""

Texts = Annotated[list[str], Field(fail_fast=True)]
"""Declare a list of texts. Validation stops at the first wrong entry, so that a million wrong entries do not cause a
million errors."""

Ids = Annotated[list[int], Field(fail_fast=True)]
"""Declare a list of token ids. Validation stops at the first wrong entry."""


class ApiModel(Bounded):
    """Declare the supported fields of a request body, with strict types: values are not converted.

    ``ignored`` fields are accepted and have no effect. ``refused`` fields would change the answer and are not
    supported: they are an error unless their value requests nothing, which is null, an empty list, one of their
    neutral values, or false unless true is neutral. ``reasons`` complete the error of a refused field: why, and what to use instead. Any other
    field is unknown, and an error unless it is null or false. Null stands for the default of every field that has one.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {}
    reasons: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the bounded schema of a body without the fields that request nothing."""
        schema: Any = super().__get_pydantic_core_schema__(source, handler)
        ref = schema.pop("ref", None)
        return core_schema.no_info_before_validator_function(cls._leave_out_what_requests_nothing, schema, ref=ref)

    @classmethod
    def _leave_out_what_requests_nothing(cls, value: Any) -> Any:
        if not (isinstance(value, dict) and any(given is None or given is False for given in value.values())):
            return value
        optional, known = _names(cls)
        strict = cls.model_config.get("extra") == "forbid"
        return {
            name: given
            for name, given in value.items()
            if not (given is None and name in optional)
            and not ((given is None or given is False) and strict and name not in known)
        }


class QueryModel(ApiModel):
    """Declare the supported fields of a query, for ``parse_query``. Values are texts that strict types read."""

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema without the checks of ``Bounded``. A URL is short, and these checks would read its texts as
        JSON."""
        return handler(source)


def examples(*bodies: Mapping[str, Any]) -> ConfigDict:
    """Return the ``model_config`` of a request whose schema has ``bodies`` as examples. The API's conformance suite
    sends them, and /docs shows them with the name of the served model as ``model``."""
    return ConfigDict(json_schema_extra={"examples": [dict(body) for body in bodies]})


Model = TypeVar("Model", bound=ApiModel)
Query = TypeVar("Query", bound=QueryModel)


async def read_body(request: Request, limit: int) -> bytes:
    """Return the complete body. Raises ``HTTPException`` 413 for a body of more than ``limit`` bytes, and 408 for a
    body that takes longer than ``server.limits.body_seconds``. Reading stops at once in both cases."""
    with request_scope().body() as held:
        return await _read_in_time(request, limit, held)


async def _read_in_time(request: Request, limit: int, held: HeldBytes) -> bytes:
    seconds = request_scope().intake.body_seconds or BODY_SECONDS
    try:
        async with asyncio.timeout(seconds):
            return await _read(request, limit, held)
    except TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {seconds:g} seconds; send it again") from None


async def _read(request: Request, limit: int, held: HeldBytes) -> bytes:
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        held.add(len(chunk))
        chunks.append(chunk)
    return b"".join(chunks)


async def parse(request: Request, model: type[Model], limit: int) -> Model:
    """Read and validate the body. Raises ``RequestError``, ``HTTPException`` or ``ClientDisconnect``."""
    scope = request_scope()
    with scope.body() as held:
        body = await _read_in_time(request, limit, held)
        scope.large = len(body) > LARGE
        return await offloaded(scope.large, lambda: validate(decode(body), model))


async def parse_optional(request: Request, model: type[Model], limit: int) -> Model:
    """Read and validate a body that may be missing or empty, which stands for ``{}``. Raises as ``parse``."""
    body = await read_body(request, limit)
    return validate(decode(body) if body.strip() else {}, model)


def parse_query(request: Request, model: type[Query]) -> Query:
    """Read and validate the query of the URL, where every value is a text. Raises ``RequestError``."""
    given = {name: value for name, value in request.query_params.items() if name not in model.ignored}
    try:
        return model.model_validate_strings(given)
    except ValidationError as error:
        raise _explain(error, model, given) from None


def decode(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``. It must be strict JSON: no NaN, no Infinity, valid UTF-8, at most
    ``MAX_DEPTH`` deep, with at most ``MAX_CONTAINERS`` arrays and objects. Raises ``RequestError``."""
    if len(body) > MAX_CONTAINERS and num_containers(body) > MAX_CONTAINERS:
        raise RequestError(
            f"the JSON body has {num_containers(body)} arrays and objects; allowed: {MAX_CONTAINERS}",
            code="body_too_complex",
        )
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body is a JSON {_json_type(value)}; allowed: an object", code="invalid_json")
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH and _is_deeper(value, MAX_DEPTH):
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH}", code="invalid_json")
    return value


def num_containers(body: bytes) -> int:
    """Return the number of arrays and objects in a JSON text; brackets within strings do not count. Takes little time,
    most of it without the GIL."""
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS:
        return 0
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"")  # a backslash escapes the character after it
    count, inside = 0, False
    for start in range(0, len(plain), _COUNTED_AT_ONCE):
        part = np.frombuffer(plain, np.uint8, min(_COUNTED_AT_ONCE, len(plain) - start), start)
        within = np.logical_xor.accumulate(part == ord('"')) ^ inside
        opens = (part == ord("[")) | (part == ord("{"))
        count += int(np.count_nonzero(opens & ~within))
        inside = bool(within[-1])
    return count


def _is_deeper(value: object, depth: int) -> bool:
    """Return True if ``value`` is nested deeper than ``depth``. Walks level by level, because recursion could overflow
    the stack."""
    level = [value]
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def validate(raw: dict[str, Any], model: type[Model]) -> Model:
    """Return the typed request. Raises ``RequestError`` that names the field."""
    known: dict[str, Any] = {}
    for name, value in raw.items():
        if name in model.ignored:
            continue
        if name not in model.refused:
            known[name] = value
        elif not _requests_nothing(value, model.refused[name]):
            reason = model.reasons.get(name)
            raise RequestError(
                f"{name} is not supported by this server{f': {reason}' if reason else ''}",
                param=name,
                code="unsupported_parameter",
            )
    try:
        return model.model_validate(known)
    except ValidationError as error:
        raise _explain(error, model, known) from None


def _requests_nothing(value: object, neutral: Sequence[object]) -> bool:
    """Return True if ``value`` is null, an empty list, one of the ``neutral`` values, or false where true is none of
    these. In JSON, 1 and 1.0 are the same number, and true is not a number."""
    if value is None or value == []:
        return True
    if value is False and not any(one is True for one in neutral):
        return True
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in neutral)


@functools.cache
def _names(model: type[ApiModel]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of the optional fields of ``model``, and those of all its fields."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    optional = frozenset(name for name, field in fields.items() if not field.is_required())
    return optional, frozenset(fields)


def _explain(error: ValidationError, model: type[Model], given: Mapping[str, Any]) -> RequestError:
    """Return an error for the first wrong field of ``given``. A union has a reason for each of its members; all those are shown that
    concern the innermost, and among these the last, value that any member refused."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if isinstance(raised := first.get("ctx", {}).get("error"), RequestError):  # by a validator
        return raised
    if not first["loc"]:
        return RequestError(f"the body is invalid: {first['msg'][:1].lower() + first['msg'][1:]}", code="invalid_type")
    field = str(first["loc"][0])
    if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
        known = ", ".join(sorted(model.model_fields))
        return RequestError(
            f"{field:.80} is not a field of this request; allowed: {known}", param=field, code="unknown_field"
        )
    places = [(_place(given, problem), problem) for problem in problems if problem["loc"][0] == first["loc"][0]]
    place, deepest = max(places, key=lambda found: _progress(found[0]))
    where = ".".join(map(str, place))
    if deepest["type"] == "missing":
        return RequestError(f"{where:.200} is missing", param=field, code="missing_field")
    allowed = " or ".join(dict.fromkeys(_reason(problem) for other, problem in places if other == place))
    value = repr(deepest["input"])
    shown = value if len(value) <= _SHOWN else value[:_SHOWN] + "..."
    return RequestError(f"{where:.200} is {shown}: {allowed}", param=field, code="invalid_type")


def _place(given: Any, problem: ErrorDetails) -> tuple[str | int, ...]:
    """Return the keys and indices that lead to the value of ``problem``. Its location has names of members of unions as well."""
    place: list[str | int] = []
    for part in problem["loc"]:
        if part in _members(given):
            given = given[part]
            place.append(part)
    if problem["type"] == "missing":
        place.append(problem["loc"][-1])
    return tuple(place)


def _members(value: Any) -> Container[Any]:
    """Return the keys or indices of ``value``, if it has any."""
    if isinstance(value, list):
        return range(len(value))
    return value if isinstance(value, dict) else ()


def _progress(place: tuple[str | int, ...]) -> tuple[int, tuple[int, ...]]:
    """Return a key that orders places by their depth, and those of the same depth by their indices in lists."""
    return len(place), tuple(part if isinstance(part, int) else -1 for part in place)


def _reason(problem: ErrorDetails) -> str:
    if problem["type"] in ("model_type", "dict_type"):
        return "input should be an object"
    context = problem.get("ctx", {})
    if problem["type"] == "union_tag_invalid":
        return f"{context['discriminator']} should be one of {context['expected_tags']}"
    if problem["type"] == "too_short" and "min_length" in context:
        return f"allowed: at least {_entries(context['min_length'])}"
    if problem["type"] == "too_long" and "max_length" in context:
        return f"allowed: at most {_entries(context['max_length'])}"
    return problem["msg"][:1].lower() + problem["msg"][1:]


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _json_type(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


def _too_large(limit: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {limit / 2**20:g} MiB (max_body_mib)")

"""Describe each route in /openapi.json: its request, its responses, and its errors in its API's format."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from fastapi import FastAPI
from pydantic import BaseModel

from dovetail.interfaces.api import ApiProblem
from dovetail.server.errors import ErrorFormats

Json = dict[str, Any]
_BODY = (400, 408, 413)
_ALWAYS = (401, 403, 404, 429, 500, 503, 504)
_REF = "#/components/schemas/"


class DescribedRoute(Protocol):
    """Describe the attributes that a route of an API or of the server has."""

    @property
    def path(self) -> str:
        """Return the path, with parameters in braces."""
        ...

    @property
    def body(self) -> type[BaseModel] | None:
        """Return the model of the request body; None if the route has no body."""
        ...

    @property
    def query(self) -> type[BaseModel] | None:
        """Return the model of the query parameters; None if the route has none."""
        ...

    @property
    def answers(self) -> Sequence[str]:
        """Return the media types of a successful response."""
        ...


class RouteDescriber:
    """Collect the schemas of all routes. Bodies are read and validated by ``dovetail.api.body``, not by FastAPI."""

    def __init__(self, formats: ErrorFormats, model: str) -> None:
        """``model`` is the model name that examples show."""
        self._formats = formats
        self._model = model
        self._schemas: dict[str, Json] = {}

    def request(self, route: DescribedRoute) -> Json:
        """Return the description of the request."""
        described: Json = {"parameters": [*_path_parameters(route.path), *_query_parameters(route.query)]}
        if route.body is not None:
            content = {"application/json": {"schema": {"$ref": _REF + self._named(route.body)}}}
            described["requestBody"] = {"required": True, "content": content}
        return described

    def responses(self, route: DescribedRoute) -> dict[int | str, Json]:
        """Return the description of the response of every status."""
        good: Json = {"description": "The response.", "content": {media: {"schema": {}} for media in route.answers}}
        takes = bool(route.body or route.query or "{" in route.path)
        statuses = sorted({*(_BODY if takes else ()), *_ALWAYS})
        return {200: good, **{status: self._error(route.path, status) for status in statuses}}

    def publish(self, app: FastAPI) -> None:
        """Add the schemas of all routes to the application's schema."""
        make = app.openapi

        def openapi() -> Json:
            schema = make()
            schema.setdefault("components", {}).setdefault("schemas", {}).update(self._schemas)
            return schema

        app.openapi = openapi

    def _error(self, path: str, status: int) -> Json:
        details: Json = {"code": "a", "param": "a", "retry_after": 1.0}
        samples = [self._formats.body(path, ApiProblem(status, "a", **given)) for given in ({}, details)]
        return {
            "description": HTTPStatus(status).phrase + ".",
            "content": {"application/json": {"schema": schema_of(samples)}},
        }

    def _named(self, body: type[BaseModel]) -> str:
        """Return the name of the body's schema. The names of the schemas that it refers to begin with that name."""
        name = f"{body.__module__.partition('.')[2]}.{body.__name__}"
        if name not in self._schemas:
            schema = body.model_json_schema(ref_template=f"{_REF}{name}.{{model}}")
            parts: dict[str, Json] = schema.pop("$defs", {})
            self._schemas |= {f"{name}.{part}": inner for part, inner in parts.items()}
            for example in schema.get("examples", ()):
                example.update({"model": self._model} if "model" in example else {})
            self._schemas[name] = schema
        return name


def _path_parameters(path: str) -> list[Json]:
    names = re.findall(r"\{(\w+)(?::\w+)?\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _query_parameters(query: type[BaseModel] | None) -> list[Json]:
    if query is None:
        return []
    schema = query.model_json_schema()
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema["properties"].items()
    ]


def schema_of(samples: Sequence[object]) -> Json:
    """Return a JSON schema that describes all of ``samples``."""
    objects = [sample for sample in samples if isinstance(sample, Mapping)]
    kinds = sorted({_kind(sample) for sample in samples})
    schema: Json = {"type": kinds if len(kinds) > 1 else kinds[0]}
    if objects:
        names = list(dict.fromkeys(name for sample in objects for name in sample))
        schema["properties"] = {
            name: schema_of([sample[name] for sample in objects if name in sample]) for name in names
        }
        schema["required"] = [name for name in names if all(name in sample for sample in objects)]
    return schema


def _kind(value: object) -> str:
    """Return the name of the JSON type of ``value``."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")

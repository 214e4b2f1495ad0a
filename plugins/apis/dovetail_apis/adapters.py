"""Read SGLang's fields that name an adapter (LoRA) for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

from pydantic import Field

from dovetail.api.placement import PlacementFields
from dovetail.api.problems import NotFoundError, UnknownModelError
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost

AdapterNames = Annotated[
    str | list[str | None] | None,
    Field(description="The name of an adapter (LoRA); a list has one entry for each prompt, null for none."),
]
"""Type of ``lora_path``."""


def adapters_of(host: ApiHost, given: str | list[str | None] | None, field: str, count: int) -> list[str]:
    """Return the adapter of each of ``count`` prompts, or "". ``given`` is the value of ``field``. Raises
    ``RequestError``."""
    if not isinstance(given, list):
        return [_adapter(host, given, field)] * count
    if len(given) != count:
        raise RequestError(f"{field} has {len(given)} entries for {count} prompts", param=field)
    adapters = {name: _adapter(host, name, field) for name in dict.fromkeys(given)}
    return [adapters[name] for name in given]


def _adapter(host: ApiHost, name: str | None, field: str) -> str:
    if not name or host.config.model.is_served(name):
        return ""
    try:
        host.check_adapter(name)
    except UnknownModelError:
        count = len(host.adapters())
        text = (
            f"{field} names the adapter {name!r:.200}, which does not exist; this server has {count} (GET /v1/models)"
        )
        raise NotFoundError(text, param=field, code="model_not_found") from None
    return name


class Placement(NamedTuple):
    """Hold the adapter and the namespace of each prompt of a request."""

    adapters: Sequence[str]
    namespaces: Sequence[str]


def placement(host: ApiHost, lora_path: str | list[str | None] | None, body: PlacementFields, count: int) -> Placement:
    """Return the adapters and namespaces of ``count`` prompts. Raises ``RequestError``."""
    return Placement(adapters_of(host, lora_path, "lora_path", count), body.namespaces(count))

"""Read SGLang's fields that name an adapter (LoRA) for each prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from dovetail.api.placement import PlacementFields
from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiHost, Prompt

AdapterNames = Annotated[
    str | list[str | None] | None,
    Field(description="The name of an adapter (LoRA); a list has one entry for each prompt, null for none."),
]
"""Type of ``lora_path``."""


def adapters_of(host: ApiHost, given: str | list[str | None] | None, field: str, count: int) -> list[str]:
    """Return the adapter of each of ``count`` prompts, or "". ``given`` is the value of ``field``. Raises
    ``RequestError``."""
    names = given if isinstance(given, list) else [given] * count
    if len(names) != count:
        raise RequestError(f"{field} has {len(names)} entries for {count} prompts", param=field)
    adapters = ["" if not name or host.config.model.is_served(name) else name for name in names]
    for name in {*adapters} - {""}:
        host.check_adapter(name)
    return adapters


def placed(
    prompts: Sequence[Prompt], host: ApiHost, lora_path: str | list[str | None] | None, body: PlacementFields
) -> list[Prompt]:
    """Return ``prompts`` with their adapters and namespaces. Raises ``RequestError``."""
    adapters = adapters_of(host, lora_path, "lora_path", len(prompts))
    where = zip(prompts, adapters, body.namespaces(len(prompts)), strict=True)
    return [replace(prompt, adapter=adapter, namespace=namespace) for prompt, adapter, namespace in where]

"""Query the server that is measured: what it reports about itself, its counters, its prefix cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx

from dovetail.bench.client.apis import ClientApi, NativeClientApi, OpenAIClientApi
from dovetail.bench.workloads import PromptVocabulary
from dovetail.errors import ConfigError, EngineError
from dovetail.tokenizer import Tokenizer

ApiName = Literal["native", "openai"]

_FLUSH_SECONDS = 10.0


@dataclass(kw_only=True)
class Target(ABC):
    """Describe a server and the API through which it is called. ``vocabulary`` is None if the server does not report
    it."""

    api: ClientApi
    name: str
    vocabulary: PromptVocabulary | None
    device: str = "not reported"
    config: dict[str, Any] | None = None

    @abstractmethod
    async def counters(self) -> dict[str, float] | None:
        """Return the engine's totals now; None if the server does not report them or is no longer reachable."""

    @abstractmethod
    async def flush(self) -> bool:
        """Empty the prefix cache; return False if the API cannot request it. Raises ``EngineError`` if the server
        refuses."""


@dataclass(kw_only=True)
class DovetailTarget(Target):
    """Query a Dovetail server."""

    client: httpx.AsyncClient

    async def counters(self) -> dict[str, float] | None:
        """Return the totals of /server_info."""
        try:
            stats = (await _get(self.client, "/server_info"))["stats"]
        except ConfigError:  # the measurements made before the server ended are worth more than its totals
            return None
        return {name: value for name, value in stats.items() if isinstance(value, int | float)}

    async def flush(self) -> bool:
        """Wait until the server is idle, which may be later than the last answer, and empty the prefix cache."""
        deadline = time.monotonic() + _FLUSH_SECONDS
        while True:
            try:
                answer = await self.client.post("/flush_cache")
            except httpx.HTTPError as error:
                raise EngineError(f"{self.client.base_url} no longer answers: {error}; see its log") from error
            if answer.status_code == 200:
                return True
            if time.monotonic() > deadline:
                raise EngineError(f"the prefix cache could not be emptied: {answer.text[:200]}")
            await asyncio.sleep(0.05)


class OpenAITarget(Target):
    """Describe any server with OpenAI's API."""

    async def counters(self) -> dict[str, float] | None:
        """Return None, because the API does not report totals."""
        return None

    async def flush(self) -> bool:
        """Return False, because the API cannot request it."""
        return False


async def find_target(
    client: httpx.AsyncClient, api: ApiName, model: str | None = None, tokenizer: Path | None = None
) -> Target:
    """Query the server at ``client``'s URL and describe it.

    ``model`` is by default the first model that the server lists. ``tokenizer`` is a directory whose vocabulary
    replaces the vocabulary that the server reports. Raises ``ConfigError``.
    """
    given = PromptVocabulary.of(Tokenizer.from_dir(tokenizer)) if tokenizer is not None else None
    name = model or await _first_model(client)
    if api == "openai":
        return OpenAITarget(api=OpenAIClientApi(name), name=name, vocabulary=given)
    try:
        about, info = await _get(client, "/model_info"), await _get(client, "/server_info")
    except ConfigError as error:
        raise ConfigError(f"{error}; if this is not a Dovetail server, use --api openai") from error
    reported = PromptVocabulary.of_size(about["tokenizer_size"], about["textless_token_ids"])
    return DovetailTarget(
        client=client,
        api=NativeClientApi(name),
        name=name,
        vocabulary=given or reported,
        device=info["engine"]["device"],
        config=info["config"],
    )


def hash_of(config: dict[str, Any]) -> str:
    """Return ``config.config_hash`` of a config that was read from JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


async def _first_model(client: httpx.AsyncClient) -> str:
    models = (await _get(client, "/v1/models")).get("data") or []
    if not models:
        raise ConfigError(f"{client.base_url} lists no model; give --served-model")
    return models[0]["id"]


async def _get(client: httpx.AsyncClient, path: str) -> dict[str, Any]:
    try:
        answer = await client.get(path)
    except httpx.HTTPError as error:
        raise ConfigError(f"{client.base_url} does not answer: {error}; is the server running?") from error
    if answer.status_code != 200:
        raise ConfigError(f"{client.base_url} answers GET {path} with {answer.status_code}: {_brief(answer.text)}")
    try:
        return answer.json()
    except json.JSONDecodeError as error:
        raise ConfigError(f"{client.base_url} answers GET {path} with invalid JSON") from error


def _brief(text: str) -> str:
    """Return the beginning of an answer on one line."""
    return " ".join(text.split())[:200] or "(no text)"

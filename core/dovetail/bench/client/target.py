"""The server that is measured: what it says of itself, its counters, its prefix cache."""

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
    """A server and the API through which it is called. ``vocabulary`` is None where nothing tells it."""

    api: ClientApi
    name: str
    vocabulary: PromptVocabulary | None
    device: str = "not reported"
    config: dict[str, Any] | None = None

    @abstractmethod
    async def counters(self) -> dict[str, float] | None:
        """The engine's totals now; None where the server does not tell, or is no longer there."""

    @abstractmethod
    async def flush(self) -> bool:
        """Empty the prefix cache; False where that cannot be asked for. Raises ``EngineError`` if the server refuses."""


@dataclass(kw_only=True)
class DovetailTarget(Target):
    """A Dovetail server."""

    client: httpx.AsyncClient

    async def counters(self) -> dict[str, float] | None:
        """/server_info's."""
        try:
            stats = (await _get(self.client, "/server_info"))["stats"]
        except ConfigError:  # what was measured before it went is worth more than its totals
            return None
        return {name: value for name, value in stats.items() if isinstance(value, int | float)}

    async def flush(self) -> bool:
        """Waits until the server is idle, which it may not be yet when the last answer is there."""
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
    """Any server with OpenAI's API."""

    async def counters(self) -> dict[str, float] | None:
        """Not told."""
        return None

    async def flush(self) -> bool:
        """The API has no way to say so."""
        return False


async def find_target(
    client: httpx.AsyncClient, api: ApiName, model: str | None = None, tokenizer: Path | None = None
) -> Target:
    """Ask the server at ``client``'s URL what it is. ``model`` is by default the first that it lists; ``tokenizer`` a directory
    whose vocabulary counts, rather than what the server says. Raises ``ConfigError``."""
    given = PromptVocabulary.of(Tokenizer.from_dir(tokenizer)) if tokenizer is not None else None
    name = model or await _first_model(client)
    if api == "openai":
        return OpenAITarget(api=OpenAIClientApi(name), name=name, vocabulary=given)
    try:
        about, info = await _get(client, "/model_info"), await _get(client, "/server_info")
    except ConfigError as error:
        raise ConfigError(f"{error}; if this is no Dovetail server, use --api openai") from error
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
    """``config.config_hash`` of a config that came as JSON."""
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
        raise ConfigError(f"{client.base_url} answers GET {path} with what is no JSON") from error


def _brief(text: str) -> str:
    """The beginning of an answer, on one line."""
    return " ".join(text.split())[:200] or "(no text)"

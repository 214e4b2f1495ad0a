"""Serve Ollama's API."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.responses import NDJSON
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail_apis.ollama.chat import chat, generate
from dovetail_apis.ollama.embed import embed, embeddings
from dovetail_apis.ollama.model import ps, show, tags, version
from dovetail_apis.ollama.types import (
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    ShowRequest,
)

_ANSWERS = ("application/json", NDJSON)


class Ollama(Api):
    """Serve Ollama's API: https://docs.ollama.com/api"""

    claims = ("/api",)

    def routes(self) -> Sequence[Route]:
        """Return the routes of chat, generate and embed, and those that describe the model."""
        return (
            Route(["POST"], "/api/chat", chat, OllamaChatRequest, answers=_ANSWERS),
            Route(["POST"], "/api/generate", generate, GenerateRequest, answers=_ANSWERS),
            Route(["POST"], "/api/embed", embed, EmbedRequest),
            Route(["POST"], "/api/embeddings", embeddings, OllamaEmbeddingsRequest),
            Route(["POST"], "/api/show", show, ShowRequest),
            Route(["GET", "HEAD"], "/api/tags", tags),
            Route(["GET"], "/api/ps", ps),
            Route(["GET", "HEAD"], "/api/version", version),
        )

    def error(self, problem: ApiProblem) -> object:
        """Return an object with one message."""
        return {"error": problem.message}

"""Ollama's API."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.responses import NDJSON
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail_apis.ollama.chat import chat, generate
from dovetail_apis.ollama.embed import embed, embeddings
from dovetail_apis.ollama.model import ps, show, tags, version
from dovetail_apis.ollama.types import ChatRequest, EmbeddingsRequest, EmbedRequest, GenerateRequest, ShowRequest

_ANSWERS = ("application/json", NDJSON)


class Ollama(Api):
    """https://docs.ollama.com/api"""

    claims = ("/api",)

    def routes(self) -> Sequence[Route]:
        """Chat, generate and embed, and what is asked about the model."""
        return (
            Route(["POST"], "/api/chat", chat, ChatRequest, answers=_ANSWERS),
            Route(["POST"], "/api/generate", generate, GenerateRequest, answers=_ANSWERS),
            Route(["POST"], "/api/embed", embed, EmbedRequest),
            Route(["POST"], "/api/embeddings", embeddings, EmbeddingsRequest),
            Route(["POST"], "/api/show", show, ShowRequest),
            Route(["GET", "HEAD"], "/api/tags", tags),
            Route(["GET"], "/api/ps", ps),
            Route(["GET", "HEAD"], "/api/version", version),
        )

    def error(self, problem: ApiProblem) -> object:
        """An object with one message."""
        return {"error": problem.message}

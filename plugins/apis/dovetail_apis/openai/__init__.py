"""OpenAI's chat completions, completions and models, with the extra fields that vLLM and SGLang know."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.responses import SSE
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail_apis.openai.chat import chat_completions
from dovetail_apis.openai.completions import completions
from dovetail_apis.openai.format import error_json
from dovetail_apis.openai.models import model, models
from dovetail_apis.openai.types import ChatRequest, CompletionRequest

_ANSWERS = ("application/json", SSE)


class OpenAI(Api):
    """https://platform.openai.com/docs/api-reference"""

    claims = ("/v1",)

    def routes(self) -> Sequence[Route]:
        """Chat completions, completions, and the model."""
        return (
            Route(["POST"], "/v1/chat/completions", chat_completions, ChatRequest, answers=_ANSWERS),
            Route(["POST"], "/v1/completions", completions, CompletionRequest, answers=_ANSWERS),
            Route(["GET"], "/v1/models", models),
            Route(["GET"], "/v1/models/{name:path}", model),
        )

    def error(self, problem: ApiProblem) -> object:
        """An object with message, type, param and code."""
        return error_json(problem)

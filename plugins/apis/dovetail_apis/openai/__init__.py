"""Serve OpenAI's chat completions, completions and models, with the additional fields of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.responses import SSE
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail_apis.openai.chat import chat_completions
from dovetail_apis.openai.completions import completions
from dovetail_apis.openai.format import error_json
from dovetail_apis.openai.models import model, models
from dovetail_apis.openai.types import ChatCompletionRequest, CompletionRequest

_ANSWERS = ("application/json", SSE)


class OpenAIApi(Api):
    """Serve OpenAI's API: https://platform.openai.com/docs/api-reference"""

    claims = ("/v1",)

    def routes(self) -> Sequence[Route]:
        """Return the routes of chat completions, completions and models."""
        return (
            Route(["POST"], "/v1/chat/completions", chat_completions, ChatCompletionRequest, answers=_ANSWERS),
            Route(["POST"], "/v1/completions", completions, CompletionRequest, answers=_ANSWERS),
            Route(["GET"], "/v1/models", models),
            Route(["GET"], "/v1/models/{name:path}", model),
        )

    def error(self, problem: ApiProblem) -> object:
        """Return an object with message, type, param and code."""
        return error_json(problem)

"""Serve Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Sequence

from dovetail.api.responses import SSE
from dovetail.interfaces.api import Api, ApiProblem, Route
from dovetail_apis.anthropic.format import error_json
from dovetail_apis.anthropic.messages import count_tokens, messages
from dovetail_apis.anthropic.types import CountRequest, MessagesRequest


class AnthropicApi(Api):
    """Serve Anthropic's Messages API: https://platform.claude.com/docs/en/api/messages"""

    claims = ("/v1/messages",)

    def routes(self) -> Sequence[Route]:
        """Return the routes that create messages and count their tokens."""
        return (
            Route(["POST"], "/v1/messages", messages, MessagesRequest, answers=("application/json", SSE)),
            Route(["POST"], "/v1/messages/count_tokens", count_tokens, CountRequest),
        )

    def error(self, problem: ApiProblem) -> object:
        """Return an object of type ``error`` that contains an object with type and message."""
        return error_json(problem)

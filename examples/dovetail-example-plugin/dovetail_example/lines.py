"""Serve one route that continues a line."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, examples, parse
from dovetail.api.requests import new_id
from dovetail.api.responses import whole
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, ApiRequest, Generation, Prompt, Route
from dovetail.sampling_params import SamplingParams
from dovetail_example.config import LineConfig


class Line(ApiModel):
    """Describe the request: the beginning of a line."""

    model_config = examples({"line": "The capital of France is"})
    line: str


class Lines(Api):
    """Answer ``POST /line`` with the rest of a line."""

    claims = ("/line",)

    def __init__(self, config: LineConfig) -> None:
        self._tokens = config.tokens

    def routes(self) -> Sequence[Route]:
        """See ``Api``."""
        return (Route(["POST"], "/line", self.continue_line, Line),)

    def error(self, problem: ApiProblem) -> object:
        """See ``Api``."""
        return {"sorry": problem.message}

    async def continue_line(self, host: ApiHost, request: Request) -> Response:
        """Continue a line."""
        body = await parse(request, Line, host.max_body)
        ids = await host.encode(body.line, add_special_tokens=True)
        params = SamplingParams(max_new_tokens=self._tokens, temperature=0, stop=("\n",))
        return await whole(request, host.submit(ApiRequest(new_id("line-"), (Prompt(ids, params),))), rest)


def rest(outputs: Generation) -> object:
    """Return the rest of the line."""
    return {"rest": outputs.choices[0].text}

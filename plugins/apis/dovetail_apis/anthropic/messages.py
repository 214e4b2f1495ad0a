"""Handle POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import parse
from dovetail.api.offload import offloaded, request_scope
from dovetail.api.requests import grammar_of, new_id, sampling_params
from dovetail.api.responses import json_response, streamed, whole
from dovetail.interfaces.api import ApiHost
from dovetail.sampling_params import GrammarSpec, SamplingParams
from dovetail_apis.anthropic.chat_input import chat_input_of
from dovetail_apis.anthropic.format import MessageFormat
from dovetail_apis.anthropic.types import CountRequest, MessagesRequest, OutputConfig
from dovetail_apis.chat_input import RequestMetadata, plan_within_context

_NAMES = {"max_new_tokens": "max_tokens", "stop": "stop_sequences", "grammar": "output_config"}


async def messages(host: ApiHost, request: Request) -> Response:
    """Return the assistant's next message."""
    body = await parse(request, MessagesRequest, host.max_body)
    host.check_model(body.model)
    metadata = RequestMetadata.of(new_id("msg_"), body)
    chat_input = await offloaded(request_scope().large, chat_input_of, body)
    api_request, _ = await plan_within_context(host, chat_input, _params(host, body), metadata)
    outputs = host.submit(api_request)
    formatter = MessageFormat(host.model_name, body, outputs)
    if body.stream:
        answer = await streamed(request, outputs, formatter)
    else:
        answer = await whole(request, outputs, formatter.whole)
    answer.headers["request-id"] = metadata.rid
    return answer


async def count_tokens(host: ApiHost, request: Request) -> Response:
    """Return the number of tokens that the prompt of a message has."""
    body = await parse(request, CountRequest, host.max_body)
    host.check_model(body.model)
    chat_input = await offloaded(request_scope().large, chat_input_of, body)
    return json_response({"input_tokens": len(await chat_input.tokens(host))})


def _params(host: ApiHost, body: MessagesRequest) -> SamplingParams:
    values = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    values |= {
        "max_new_tokens": body.max_tokens,
        "stop": tuple(body.stop_sequences or ()),
        "grammar": _grammar(body.output_config),
    }
    return sampling_params(values, _NAMES, host.sampling_defaults)


def _grammar(config: OutputConfig | None) -> GrammarSpec | None:
    return grammar_of({"json_schema": config.format.schema_}) if config and config.format else None

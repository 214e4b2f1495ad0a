"""Serve POST /generate in the format of SGLang's native API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, Ids, Int32, Rid, Rids, examples, parse, validate
from dovetail.api.meta import cached_json, finish_json, logprobs_json
from dovetail.api.offload import for_each
from dovetail.api.placement import SessionFields
from dovetail.api.requests import (
    api_names,
    check_count,
    check_logprobs,
    request_names,
    sampling_params,
    with_output_limit,
)
from dovetail.api.responses import SSE, event, streamed, whole
from dovetail.api.sampling import SamplingFields
from dovetail.errors import RequestError
from dovetail.interfaces.api import (
    Acceptance,
    Api,
    ApiHost,
    ApiProblem,
    ApiRequest,
    Choice,
    Delta,
    Generation,
    Prompt,
    Route,
)
from dovetail.sampling_params import SamplingParams
from dovetail_apis.adapters import AdapterNames, adapters_of
from dovetail_apis.fields import GENERATE, SAMPLING_PARAMS

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
_NAMES = {
    "seed": "sampling_seed",
    "include_stop": "no_stop_trim",
    "logprobs": "top_logprobs_num",
    "thinking_budget": "max_thinking_tokens",
}
_LISTS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "token_ids_logprob")
"""List the fields that may have one entry for each prompt."""

Start = Annotated[int, Field(ge=-1)]
"""Type of the first position of a prompt whose log-probabilities are returned; -1 stands for none."""


class Native(Api):
    """Serve SGLang's native API."""

    def routes(self) -> Sequence[Route]:
        """Return the route of /generate."""
        return (Route(["POST"], "/generate", generate, NativeRequest, answers=("application/json", SSE)),)


class NativeStreamOptions(ApiModel):
    """Configure a stream. Every event has the token counts in any case, in ``meta_info``."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class NativeSampling(SamplingFields):
    """Describe ``sampling_params`` of /generate. None stands for the default."""

    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    max_tokens: Int32 | None = Field(None, description="vLLM's name of `max_new_tokens`.")
    min_tokens: Int32 | None = Field(None, description="vLLM's name of `min_new_tokens`.")
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None
    include_stop_str_in_output: bool | None = Field(None, description="vLLM's name of `no_stop_trim`.")

    ignored = SAMPLING_PARAMS.ignored
    refused = SAMPLING_PARAMS.refused
    reasons = SAMPLING_PARAMS.reasons


class NativeRequest(SessionFields):
    """Describe the body of POST /generate: one prompt or several, as text or token ids."""

    model_config = examples(
        {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
        {"input_ids": [[5, 6, 7], [8, 9]], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True},
        {"text": "Once upon a time", "sampling_params": {"max_new_tokens": 8}, "stream": True},
    )

    text: str | list[str] | None = None
    input_ids: Ids | list[Ids] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None, description="See `NativeSampling`; a list has one entry for each prompt."
    )
    stream: bool = False
    stream_options: NativeStreamOptions | None = None
    rid: Rid | Rids | None = Field(None, description="Id of the request, or the ids of its prompts.")
    return_logprob: bool | list[bool] = False
    logprob_start_len: Start | list[Start] | None = Field(
        None,
        description="0 includes the prompt, a larger number leaves out its beginning. By default only the output is included, "
        "or the prompt if max_new_tokens is 0.",
    )
    top_logprobs_num: int | list[int] = 0
    token_ids_logprob: list[int] | list[list[int]] | None = Field(
        None, description="Tokens whose log-probabilities are returned at each position, too."
    )
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    lora_path: AdapterNames = None
    lora_name: str | list[str | None] | None = Field(None, description="Another name of `lora_path`.")
    max_thinking_tokens: Int32 | None = Field(None, description="The largest number of tokens of the reasoning.")
    group: Rid | None = Field(
        None,
        description="Requests of one group share a prefix, which is computed once and kept cached for all of them.",
    )
    group_size: Int32 | None = Field(
        None,
        ge=1,
        description="Number of outputs that the group will have; by default the number of outputs of this request.",
    )

    ignored = GENERATE.ignored
    refused = GENERATE.refused
    reasons = GENERATE.reasons

    def of_prompt(self, name: str, index: int, count: int) -> Any:
        """Return the value of a field for one of ``count`` prompts. Raises ``RequestError`` if the field is a list of
        another length."""
        given = getattr(self, name)
        nested = isinstance(given, list) and (name != "token_ids_logprob" or bool(given and isinstance(given[0], list)))
        if not nested:
            return given
        if len(given) != count:
            raise RequestError(f"{name} has {len(given)} entries for {count} prompts", param=name)
        return given[index]


async def generate(host: ApiHost, request: Request) -> Response:
    """Return the continuation of a prompt, or a list if there are several prompts or outputs."""
    body = await parse(request, NativeRequest, host.max_body)
    parsed = await _parsed(host, body)
    with api_names(_NAMES):
        outputs = await host.submit_in_parts(parsed)
    single = not _is_batch(body) and parsed.prompts[0].params.n == 1
    formatter = NativeFormat(host, body, outputs, len(parsed.prompts), single)
    if body.stream:
        return await streamed(request, outputs, formatter)
    return await whole(request, outputs, formatter.whole)


async def _parsed(host: ApiHost, body: NativeRequest) -> ApiRequest:
    if (body.text is None) == (body.input_ids is None):
        raise RequestError("give one of text and input_ids", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    prompts = given if _is_batch(body) else [given]
    param = "text" if body.text is not None else "input_ids"
    check_count(host, len(prompts), param)
    if not all(prompts):
        raise RequestError(f"{param} has an empty prompt; give at least one token", param=param, code="empty_prompt")
    params_of = _sampling(host, body, len(prompts))
    rid, names = request_names(body.rid, len(prompts), "")
    field = "lora_path" if body.lora_name is None else "lora_name"
    adapters = _adapters(host, body, field, len(prompts))
    namespaces = body.namespaces(len(prompts))

    async def prompt_of(given: tuple[int, str | list[int], str, str, str]) -> Prompt:
        index, prompt, *own = given
        params = params_of(index)
        ids = await host.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else prompt
        params = with_output_limit(params, host.output_limit(ids, _DEFAULT_MAX_NEW_TOKENS))
        return Prompt(ids, params, *own, adapter_param=field)

    inputs = zip(range(len(prompts)), prompts, names, adapters, namespaces, strict=True)
    items = await for_each(list(inputs), prompt_of)
    return ApiRequest(
        rid,
        tuple(items),
        priority=body.priority or 0,
        group=body.group or "",
        group_size=body.group_size or 0,
        session=body.session or (body.session_id or "" if len(items) * items[0].params.n == 1 else ""),
    )


def _adapters(host: ApiHost, body: NativeRequest, field: str, count: int) -> list[str]:
    """Return the adapter of each prompt, which ``field`` names, or "". Raises ``RequestError``."""
    if body.lora_path is not None and body.lora_name is not None and body.lora_path != body.lora_name:
        raise RequestError("lora_path and lora_name differ; give one of them", param="lora_name")
    return adapters_of(host, getattr(body, field), field, count)


def _sampling(host: ApiHost, body: NativeRequest, count: int) -> Callable[[int], SamplingParams]:
    """Return a function that returns the parameters of the prompt with a given index. Both raise ``RequestError``."""
    given = body.sampling_params or {}
    if isinstance(given, list) and len(given) != count:
        raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts", param="sampling_params")
    if isinstance(given, list):
        return lambda index: _params(host, body, validate(given[index], NativeSampling), index, count)
    sampling = validate(given, NativeSampling)
    first = _params(host, body, sampling, 0, count)
    each = any(isinstance(getattr(body, name), list) for name in _LISTS)
    return lambda index: _params(host, body, sampling, index, count) if each else first


def _params(host: ApiHost, body: NativeRequest, given: NativeSampling, index: int, count: int) -> SamplingParams:
    """Return the parameters of prompt ``index``. Raises ``RequestError``."""
    returned, start, top, token_ids = (body.of_prompt(name, index, count) for name in _LISTS)
    length = _one(given, "max_new_tokens", "max_tokens")
    if start is None and length == 0:
        start = 0  # SGLang's frontend asks like this for the log-probabilities of a prompt
    values = {
        **given.sampling(),
        "max_new_tokens": length,
        "min_new_tokens": _one(given, "min_new_tokens", "min_tokens"),
        "seed": _one(given, "seed", "sampling_seed"),
        "include_stop": _one(given, "no_stop_trim", "include_stop_str_in_output"),
        "logprobs": (top or 0) if returned else None,
        "prompt_logprobs": (top or 0) if returned and start is not None and start >= 0 else None,
        "prompt_logprobs_start": max(start or 0, 0),
        "token_ids_logprob": tuple(token_ids) if returned and token_ids else None,
        "thinking_budget": body.max_thinking_tokens,
    }
    params = sampling_params(values, _NAMES, host.sampling_defaults)
    check_logprobs(host, params, {**_NAMES, "prompt_logprobs": "top_logprobs_num"})
    return params


def _one(given: NativeSampling, name: str, other: str) -> Any:
    """Return the value of a field that has two names. Raises ``RequestError`` if both are given and differ."""
    first, second = getattr(given, name), getattr(given, other)
    if first is not None and second is not None and first != second:
        raise RequestError(f"{name} is {first} and {other} is {second}; give one of them", param=other)
    return second if first is None else first


class NativeFormat:
    """Format the answer to one request. Each event of a stream repeats the whole text so far, as in SGLang."""

    media_type = SSE

    def __init__(self, host: ApiHost, body: NativeRequest, outputs: Generation, count: int, single: bool) -> None:
        """Prepare the answer to ``body``, which has ``count`` prompts: an object if the request is ``single``, otherwise
        a list."""
        self._outputs = outputs
        self._tokenizer = host.tokenizer
        self._body = body
        self._count = count
        self._single = single

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        answers = [self._answer(choice) for choice in outputs.choices]
        return answers[0] if self._single else answers

    def head(self) -> bytes:
        """Return nothing: the stream begins with the first output."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return one event for each choice that the step changed."""
        touched = {delta.choice.index: delta.choice for delta in deltas}
        return b"".join(event(msgspec.json.encode(self._streamed(choice))) for choice in touched.values())

    def tail(self) -> bytes:
        """Return the end marker."""
        return event(b"[DONE]")

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return event(msgspec.json.encode({"error": {"message": problem.message}}))

    def _streamed(self, choice: Choice) -> dict[str, Any]:
        answer = self._answer(choice)
        return answer if self._single else {**answer, "index": choice.index}

    def _answer(self, choice: Choice) -> dict[str, Any]:
        rid, of_prompt = self._id(choice)
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish_json(choice.finish, len(choice.token_ids)),
            "prompt_tokens": len(choice.prompt_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
            "e2e_latency": self._outputs.elapsed,
        }
        if choice.cached_tokens or any(choice.cached_groups):
            meta["cached_tokens_details"] = cached_json(choice.cached_tokens, choice.cached_groups)
        if choice.grammar_backend is not None:
            meta["grammar_backend"] = choice.grammar_backend
        if choice.acceptance.drafted:
            meta |= _speculation(choice.acceptance)
        if self._body.of_prompt("return_logprob", of_prompt, self._count):
            meta |= self._logprobs(choice, of_prompt)
        answer = {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}
        return {**answer, "prompt_token_ids": choice.prompt_ids} if self._body.return_prompt_token_ids else answer

    def _id(self, choice: Choice) -> tuple[str, int]:
        """Return the public id of a choice, and the index of its prompt."""
        outputs_each = len(self._outputs.choices) // self._count
        of_prompt, number = divmod(choice.index, outputs_each)
        given = self._body.rid
        if self._single:
            return self._outputs.rid, 0
        if isinstance(given, list):
            return given[of_prompt] if outputs_each == 1 else f"{given[of_prompt]}_{number}", of_prompt
        return f"{self._outputs.rid}_{choice.index}", of_prompt

    def _logprobs(self, choice: Choice, of_prompt: int) -> dict[str, Any]:
        top = bool(self._body.of_prompt("top_logprobs_num", of_prompt, self._count))
        given = bool(self._body.of_prompt("token_ids_logprob", of_prompt, self._count))
        return {
            **logprobs_json(choice.prompt_logprobs, "input", top, self._text, given),
            **logprobs_json(choice.logprobs, "output", top, self._text, given),
            "output_token_logprobs_length": len(choice.logprobs),
        }

    def _text(self, token_id: int) -> str | None:
        shown = self._body.return_text_in_logprobs
        return self._tokenizer.bytes_of(token_id).decode("utf-8", "replace") if shown else None


def _speculation(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "spec_draft_token_num": acceptance.drafted,
        "spec_accept_token_num": acceptance.accepted,
        "spec_verify_ct": acceptance.steps,
        "spec_accept_length": acceptance.length,
        "spec_accept_rate": acceptance.rate,
    }


def _is_batch(body: NativeRequest) -> bool:
    given: Any = body.text if body.text is not None else body.input_ids
    return isinstance(given, list) and bool(given) and not isinstance(given[0], int)

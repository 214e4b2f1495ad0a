"""Serve POST /generate in the format of SGLang's native API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from dovetail.api.body import ApiModel, CacheSalt, Ids, Int32, Rid, Session, examples, parse, validate
from dovetail.api.meta import finish_json, logprobs_json
from dovetail.api.requests import check_count, new_id, sampling_params, with_output_limit
from dovetail.api.responses import SSE, event, streamed, whole
from dovetail.api.sampling import SamplingFields
from dovetail.errors import RequestError
from dovetail.interfaces.api import Api, ApiHost, ApiProblem, ApiRequest, Choice, Delta, Generation, Prompt, Route
from dovetail.sampling_params import SamplingParams
from dovetail.types import Acceptance

_DEFAULT_MAX_NEW_TOKENS = 128  # SGLang's
_NAMES = {"seed": "sampling_seed", "include_stop": "no_stop_trim", "logprobs": "top_logprobs_num"}


class Native(Api):
    """Serve SGLang's native API."""

    def routes(self) -> Sequence[Route]:
        """Return the route of /generate."""
        return (Route(["POST"], "/generate", generate, NativeRequest, answers=("application/json", SSE)),)


class NativeSampling(SamplingFields):
    """Describe ``sampling_params`` of /generate. None stands for the default."""

    max_new_tokens: Int32 | None = None
    min_new_tokens: Int32 | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None

    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "stop_regex": (),
        "custom_params": ({},),
        "spaces_between_special_tokens": (True,),
    }


class NativeRequest(ApiModel):
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
    rid: Rid | None = None
    return_logprob: bool = False
    logprob_start_len: int | None = Field(
        None,
        ge=-1,
        description="0 includes the prompt, a larger number leaves out its beginning. By default only the output is included.",
    )
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    priority: Int32 | None = None
    cache_salt: CacheSalt = None
    group: Rid | None = Field(
        None,
        description="Requests of one group share a prefix, which is computed once and kept cached for all of them.",
    )
    group_size: Int32 | None = Field(
        None,
        ge=1,
        description="Number of outputs that the group will have; by default the number of outputs of this request.",
    )
    session: Session = None

    ignored = frozenset({"log_metrics", "background"})
    refused: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "image_data": (),
        "audio_data": (),
        "video_data": (),
        "input_embeds": (),
        "lora_path": (),
        "session_params": (),
        "custom_logit_processor": (),
        "token_ids_logprob": (),
        "return_hidden_states": (False,),
    }


async def generate(host: ApiHost, request: Request) -> Response:
    """Return the continuation of a prompt, or a list if there are several prompts or outputs."""
    body = await parse(request, NativeRequest, host.max_body)
    parsed = await _parsed(host, body)
    outputs = host.submit(parsed)
    single = not _is_batch(body) and parsed.prompts[0].params.n == 1
    formatter = NativeFormat(host, body, outputs, single)
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
    chosen = _sampling(body, len(prompts))
    ids = [await host.encode(p, add_special_tokens=True) if isinstance(p, str) else p for p in prompts]
    items = tuple(
        Prompt(tokens, with_output_limit(params, host.output_limit(tokens, _DEFAULT_MAX_NEW_TOKENS)))
        for tokens, params in zip(ids, chosen, strict=True)
    )
    return ApiRequest(
        body.rid or new_id(""),
        items,
        namespace=body.cache_salt or "",
        priority=body.priority or 0,
        group=body.group or "",
        group_size=body.group_size or 0,
        session=body.session or "",
    )


def _sampling(body: NativeRequest, count: int) -> list[SamplingParams]:
    given = body.sampling_params or {}
    if not isinstance(given, list):
        return [_params(body, validate(given, NativeSampling))] * count
    if len(given) != count:
        raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts", param="sampling_params")
    return [_params(body, validate(one, NativeSampling)) for one in given]


def _params(body: NativeRequest, given: NativeSampling) -> SamplingParams:
    if given.seed is not None and given.sampling_seed is not None:
        raise RequestError("give one of seed and sampling_seed", param="sampling_seed")
    with_prompt = body.return_logprob and body.logprob_start_len is not None and body.logprob_start_len >= 0
    values = {
        **given.sampling(),
        "max_new_tokens": given.max_new_tokens,
        "min_new_tokens": given.min_new_tokens,
        "seed": given.seed if given.seed is not None else given.sampling_seed,
        "include_stop": given.no_stop_trim,
        "logprobs": body.top_logprobs_num if body.return_logprob else None,
        "prompt_logprobs": body.top_logprobs_num if with_prompt else None,
        "prompt_logprobs_start": max(body.logprob_start_len or 0, 0),
    }
    return sampling_params(values, _NAMES)


class NativeFormat:
    """Format the answer to one request. Each event of a stream repeats the whole text so far, as in SGLang."""

    media_type = SSE

    def __init__(self, host: ApiHost, body: NativeRequest, outputs: Generation, single: bool) -> None:
        """Prepare the answer to ``body``: an object if the request is ``single``, otherwise a list."""
        self._outputs = outputs
        self._tokenizer = host.tokenizer
        self._body = body
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
        rid = self._outputs.rid if self._single else f"{self._outputs.rid}_{choice.index}"
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish_json(choice.finish, len(choice.token_ids)),
            "prompt_tokens": len(choice.prompt_ids),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": choice.cached_tokens,
            "e2e_latency": self._outputs.elapsed,
        }
        if choice.grammar_backend is not None:
            meta["grammar_backend"] = choice.grammar_backend
        if choice.acceptance.drafted:
            meta |= _speculation(choice.acceptance)
        if self._body.return_logprob:
            meta |= self._logprobs(choice)
        return {"text": choice.text, "output_ids": choice.token_ids, "meta_info": meta}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        top = bool(self._body.top_logprobs_num)
        return {
            **logprobs_json(choice.prompt_logprobs, "input", top, self._text),
            **logprobs_json(choice.logprobs, "output", top, self._text),
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

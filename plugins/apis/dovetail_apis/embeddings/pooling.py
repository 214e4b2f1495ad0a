"""Build prompts that are pooled into vectors instead of being continued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.api.offload import for_each
from dovetail.api.requests import check_count
from dovetail.api.truncation import TruncationFields
from dovetail.errors import ContextLengthError, RequestError
from dovetail.interfaces.api import ApiHost, Choice, Prompt, Usage
from dovetail.sampling_params import Pooling, PoolingKind, SamplingParams
from dovetail.token_checks import check_token_ids
from dovetail.types import FloatArray
from dovetail_apis.adapters import Placement


def pooling_params(kind: PoolingKind, token_ids: tuple[int, ...] = ()) -> SamplingParams:
    """Return the parameters of a prompt that is pooled. Raises ``RequestError``."""
    return SamplingParams(max_new_tokens=0, pooling=Pooling(kind, token_ids))


async def as_prompts(
    host: ApiHost,
    texts: Sequence[str | list[int]],
    params: SamplingParams | Callable[[int], SamplingParams],
    param: str,
    truncation: TruncationFields | None = None,
    *,
    add_special_tokens: bool = True,
    names: Sequence[str] | None = None,
    where: Placement | None = None,
    fields: Sequence[str] | None = None,
) -> list[Prompt]:
    """Return prompts of texts or token ids, cut as ``truncation`` requires, with the public ids ``names``, adapters and
    namespaces. ``params`` may be a function that returns those of the text with a given index: there may be thousands, and
    it is called for one after the other while the event loop does other work. Raises a ``RequestError`` that names ``param``, or the one
    of ``fields``, for a text without tokens, with more than the context holds, and for invalid token ids."""
    count = len(texts)
    check_count(host, count, param)

    async def as_prompt(given: tuple[int, str | list[int], str, str, str | None]) -> Prompt:
        index, text, name, adapter, namespace = given
        field = fields[index] if fields is not None else param if count == 1 else f"{param}.{index}"
        own = field.partition(".")[0]
        try:
            if truncation is not None:
                ids = await truncation.encoded(host, text, add_special_tokens, 0)
            else:
                ids = await host.encode(text, add_special_tokens) if isinstance(text, str) else text
        except ContextLengthError as error:
            raise ContextLengthError(f"{field}: {error}", param=own) from None
        if not ids:
            raise RequestError(f"{field} has an empty text; give at least one token", param=own, code="empty_prompt")
        if len(ids) > host.context_len:
            raise ContextLengthError(f"{field} has {len(ids)} tokens; the context holds {host.context_len}", param=own)
        check_token_ids(own, ids, host.vocab_size)
        return Prompt(ids, params(index) if callable(params) else params, name, adapter, namespace)

    adapters, namespaces = where or ([""] * count, [None] * count)
    inputs = zip(range(count), texts, names or [""] * count, adapters, namespaces, strict=True)
    return await for_each(list(inputs), as_prompt)


def pooled(choice: Choice) -> FloatArray:
    """Return the vector of a finished prompt. Raises ``RequestError`` if the prompt was aborted."""
    if choice.pooled is None:
        message = choice.finish.message if choice.finish is not None else None
        raise RequestError(f"the request was aborted: {message}", code="aborted")
    return choice.pooled


def input_usage(usage: Usage) -> dict[str, Any]:
    """Return the token counts of a request that generates nothing, with OpenAI's names."""
    details = {"cached_tokens": usage.cached}
    return {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt, "prompt_tokens_details": details}

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
    it is called for one after the other while the event loop does other work. ``fields`` are the names that errors give to
    the texts; the default is ``param``, or with several texts ``param`` with an index, such as ``input.3``. Raises
    ``RequestError`` for a text without tokens, with more than the context holds, and for invalid token ids."""
    count = len(texts)
    check_count(host, count, param)
    if fields is None:
        fields = [param] if count == 1 else [f"{param}.{index}" for index in range(count)]

    async def as_prompt(given: tuple[int, str | list[int], str, str, str, str | None]) -> Prompt:
        index, text, field, name, adapter, namespace = given
        try:
            if truncation is not None:
                ids = await truncation.encoded(host, text, add_special_tokens, 0)
            else:
                ids = await host.encode(text, add_special_tokens) if isinstance(text, str) else text
        except ContextLengthError as error:
            raise ContextLengthError(f"{field}: {error}", param=param_of(field)) from None
        if not ids:
            message = f"{field} has an empty text; give at least one token"
            raise RequestError(message, param=param_of(field), code="empty_prompt")
        if len(ids) > host.context_len:
            message = f"{field} has {len(ids)} tokens; the context holds {host.context_len}"
            raise ContextLengthError(message, param=param_of(field))
        check_token_ids(field, ids, host.vocab_size, param_of(field))
        return Prompt(ids, params(index) if callable(params) else params, name, adapter, namespace)

    adapters, namespaces = where or ([""] * count, [None] * count)
    inputs = zip(range(count), texts, fields, names or [""] * count, adapters, namespaces, strict=True)
    return await for_each(list(inputs), as_prompt)


def param_of(field: str) -> str:
    """Return the request field of which ``field`` is an entry: ``documents`` for ``documents.3``."""
    return field.partition(".")[0]


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

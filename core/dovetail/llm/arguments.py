"""Check and convert the arguments of the methods of ``LLM``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

from dovetail.api.requests import CONSTRAINTS, grammar_of, token_biases, without_options
from dovetail.errors import ConfigError, RequestError
from dovetail.sampling_names import OTHER_NAMES
from dovetail.sampling_params import SamplingParams

P = ParamSpec("P")
R = TypeVar("R")

Prompt = str | Sequence[int]
"""A prompt: text, or a list of token ids."""


def arguments_of(target: Callable[P, object]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Return a decorator for methods that pass all their arguments on to ``target``. Documentation and type checkers then show
    the arguments of ``target``, and a call with other arguments raises ``TypeError`` that names the method."""

    def decorate(method: Callable[..., R]) -> Callable[P, R]:
        returned = inspect.signature(method).return_annotation
        signature = inspect.signature(target).replace(return_annotation=returned)

        @functools.wraps(method)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{method.__qualname__}() {error}") from None
            return method(*args, **kwargs)

        wrapper.__signature__ = signature  # pyright: ignore
        return wrapper

    return decorate


class AdapterRequest(Protocol):
    """Describe an adapter with its files, as vLLM's ``LoRARequest`` does."""

    lora_name: str
    lora_path: str


AdapterChoice: TypeAlias = "str | AdapterRequest | None"
"""The adapter of a prompt: its name, a description with its files, or None."""


class GroupHints(NamedTuple):
    """Hold the hints for requests that belong together. See ``messages.GenerateMsg``."""

    group: str = ""
    group_size: int = 1
    session: str = ""


def hints_of(group: object, group_size: object, session: object, outputs: int) -> GroupHints:
    """Return the hints of a call with ``outputs`` outputs. Raises ``RequestError``."""
    for param, name in (("group", group), ("session", session)):
        if not isinstance(name, str):
            raise RequestError(f"{param} is {name!r:.80}; allowed: a name (str)", param=param)
    if group_size is not None and not (isinstance(group_size, int) and group_size >= 1):
        raise RequestError(f"group_size is {group_size!r:.80}; allowed: an integer of at least 1", param="group_size")
    if session and outputs != 1:
        raise RequestError(
            f"the call is for {outputs} outputs of session {session!r:.80}; a session has one at a time",
            param="session",
        )
    return GroupHints(str(group), outputs if group_size is None else group_size, str(session))


def adapters_of_each(given: AdapterChoice | Sequence[AdapterChoice], prompts: int) -> Sequence[AdapterChoice]:
    """Return the adapter of each of ``prompts`` prompts. Raises ``RequestError``."""
    several: list[Any] = list(given) if isinstance(given, list | tuple) else [given] * prompts
    if len(several) != prompts:
        raise RequestError(
            f"adapter has {len(several)} entries and there are {prompts} prompts; give one, or as many", param="adapter"
        )
    for choice in several:
        if not (
            choice is None or isinstance(choice, str) or (hasattr(choice, "lora_name") and hasattr(choice, "lora_path"))
        ):
            raise RequestError(
                f"adapter is {choice!r:.80}; allowed: a name, an object with lora_name and lora_path, or None",
                param="adapter",
            )
    return several


def with_path(section: object, path: str) -> dict[str, Any]:
    """Return the ``model`` section with the path that was given as the first argument. Raises ``ConfigError`` if it has one already."""
    if not isinstance(section, dict) or "path" in section:
        raise ConfigError(f"the model is given twice, as {path!r} and as model={section!r}; keep one")
    return {**section, "path": path}


def prompt_list(prompts: object) -> list[Prompt]:
    """Return one prompt or several as a list. Raises ``RequestError``."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; allowed: text, a list of token ids, or a list of such prompts",
            param="prompts",
        )
    single = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [list(prompts)] if single else list(prompts)


def joined_prompts(queries: Sequence[Prompt], items: Sequence[Prompt], item_first: bool) -> list[Prompt]:
    """Return query and item joined, for each item; texts are joined before they are tokenized. Raises ``RequestError`` if
    one of them is a text and the other is not."""
    joined: list[Prompt] = []
    for query, item in zip(queries, items, strict=True):
        first, second = (item, query) if item_first else (query, item)
        if isinstance(first, str) and isinstance(second, str):
            joined.append(first + second)
        elif isinstance(first, str) or isinstance(second, str):
            raise RequestError("query and items are of different kinds; allowed: texts, or lists of token ids")
        else:
            joined.append([*first, *second])
    return joined


def token_ids_of(prompt: object) -> list[int]:
    """Return a prompt of token ids as a new list. Raises ``RequestError``."""
    if isinstance(prompt, list) and set(map(type, prompt)) <= {
        int
    }:  # the usual case; this check is many times faster than the general one
        return prompt.copy()
    if not isinstance(prompt, Sequence) or not all(isinstance(t, Integral) for t in prompt):
        raise RequestError(
            f"a prompt is {prompt!r:.80}; allowed: text, or a list of token ids (integers)", param="prompts"
        )
    return [int(token) for token in prompt]


Params = SamplingParams | Mapping[str, Any]
"""Sampling params, or a mapping with the names of ``SamplingParams``, vLLM or SGLang (``sampling_params_of``)."""


def sampling_params_of(params: Params, defaults: Mapping[str, Any] = {}) -> SamplingParams:
    """Return the sampling params that a mapping describes. Values that are None, or missing, are those of ``defaults``, or
    the defaults of ``SamplingParams``. Constraints have
    the names of SGLang's sampling params (``json_schema``, ``regex``, ...) or are in vLLM's ``structured_outputs``. Raises
    ``RequestError``."""
    if isinstance(params, SamplingParams):
        return params
    given = {name: value for name, value in params.items() if value is not None}
    structured = given.pop("structured_outputs", None) or given.pop("guided_decoding", None) or {}
    if not isinstance(structured, Mapping):
        raise RequestError(f"structured_outputs is {structured!r:.80}; allowed: a mapping", param="structured_outputs")
    constraints: dict[str, Any] = {
        _STRUCTURED.get(str(name), str(name)): value
        for name, value in without_options(structured).items()
        if value is not None
    }
    constraints |= {name: given.pop(name) for name in CONSTRAINTS if name in given}
    if unknown := constraints.keys() - {*CONSTRAINTS, "response_format"}:
        raise RequestError(
            f"structured_outputs has {', '.join(sorted(unknown))}; allowed: {', '.join(_STRUCTURED)}",
            param="structured_outputs",
        )
    if constraints.pop("response_format", None):
        constraints["response_format"] = {"type": "json_object"}
    backend = given.pop("grammar_backend", None)
    if constraints or backend:
        given["grammar"] = grammar_of(constraints, backend)
    biases = given.get("logit_bias")
    if isinstance(biases, Mapping) and any(isinstance(key, str) for key in biases):
        given["logit_bias"] = token_biases({str(key): bias for key, bias in biases.items()})
    chosen = {OTHER_NAMES.get(str(name), str(name)) for name in given}
    return SamplingParams(**given, **{name: value for name, value in defaults.items() if name not in chosen})


_STRUCTURED = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf",
               "structural_tag": "structural_tag", "json_object": "response_format"}  # fmt: skip
"""Map the fields of vLLM's ``structured_outputs`` to the names of the API."""


def one_of(params: object, sampling_params: object) -> object:
    """Return the sampling params, which a call takes under two names. Raises ``RequestError`` if both are given."""
    if params is not None and sampling_params is not None:
        raise RequestError("params and sampling_params are both given; they are the same, keep one", param="params")
    return params if sampling_params is None else sampling_params


def params_of_each(params: object, count: int, defaults: Mapping[str, Any] = {}) -> list[SamplingParams]:
    """Return the sampling params of each of ``count`` prompts. ``defaults`` are the values that mappings do not set, and
    those of prompts without params. Raises ``RequestError``."""
    if params is None or isinstance(params, Mapping):
        params = sampling_params_of(params or {}, defaults)
    elif isinstance(params, Sequence) and all(isinstance(p, SamplingParams | Mapping) for p in params):
        params = [sampling_params_of(p, defaults) for p in params]
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(
            f"params is {params!r:.80}; allowed: one SamplingParams or a mapping of its fields, or a list of them",
            param="params",
        )
    if len(params) != count:
        raise RequestError(
            f"{len(params)} sampling params for {count} prompts; give one for all prompts, or one for each",
            param="params",
        )
    return list(params)


def checked_messages(messages: object) -> list[Mapping[str, Any]]:
    """Return the messages of a chat as a list. Raises ``RequestError``, also if there are none."""
    if not messages or not isinstance(messages, Sequence) or not all(isinstance(m, Mapping) for m in messages):
        raise RequestError(
            f"messages is {messages!r:.80}; allowed: a list of {{'role': 'user', 'content': '...'}}", param="messages"
        )
    return list(messages)


def checked_variables(variables: object) -> Mapping[str, Any]:
    """Return the additional variables of a chat template. Raises ``RequestError``."""
    if not isinstance(variables, Mapping):
        raise RequestError(
            f"chat_template_kwargs is {variables!r:.80}; allowed: a mapping of names to values",
            param="chat_template_kwargs",
        )
    return variables

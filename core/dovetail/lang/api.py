"""Define the functions from which programs are written: ``gen``, ``select``, messages and pictures; and import the
other public names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.lang.backends import Backend as Backend
from dovetail.lang.backends.anthropic import Anthropic as Anthropic
from dovetail.lang.backends.endpoint import RuntimeEndpoint as RuntimeEndpoint
from dovetail.lang.backends.local import Runtime as Runtime
from dovetail.lang.backends.openai import OpenAI as OpenAI
from dovetail.lang.choices import ChoicesMethod
from dovetail.lang.choices import greedy_token_selection as greedy_token_selection
from dovetail.lang.choices import token_length_normalized as token_length_normalized
from dovetail.lang.choices import unconditional_likelihood_normalized as unconditional_likelihood_normalized
from dovetail.lang.defaults import flush_cache as flush_cache
from dovetail.lang.defaults import get_server_info as get_server_info
from dovetail.lang.defaults import set_default_backend as set_default_backend
from dovetail.lang.ir import (
    REGEX_BOOL,
    REGEX_FLOAT,
    REGEX_INT,
    REGEX_STR,
    Expr,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    SamplingOptions,
    Select,
    SeparateReasoning,
    joined,
)
from dovetail.lang.ir import expression as _expression
from dovetail.lang.program import Function as Function
from dovetail.lang.program import function as function
from dovetail.lang.reasoning import marks_of
from dovetail.lang.state import ProgramState as ProgramState

_DTYPES = {"int": REGEX_INT, "float": REGEX_FLOAT, "bool": REGEX_BOOL, "str": REGEX_STR}


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Expr:
    """Generate text with the model; the text becomes the variable ``name``. Options that are None are taken from
    ``run``.

    ``regex``, ``json_schema`` (a schema, or its JSON) and ``dtype`` (``int``, ``float``, ``bool``, ``str``: a string in
    quotes) constrain the text. The variable is text in any case: ``int(s["x"])``. With ``choices``, ``gen`` is
    ``select``. With ``n > 1`` the variable is a list, and the prompt continues with the first output. ``stop_regex``
    keeps its position in the signatures of other frontends, and must be None. Raises ``ValueError``.
    """
    if stop_regex is not None:
        raise ValueError(f"stop_regex is {stop_regex!r:.80}; give stop=[...] or constrain the output with regex=")
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    sampling = SamplingOptions.of(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        n=n,
        stop=stop,
        stop_token_ids=stop_token_ids,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        seed=seed,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
        constraint=_constraint(dtype, regex, json_schema),
    )
    return Gen(name, sampling)


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **settings: Any,
) -> Expr:
    """Generate an integer; ``settings`` are those of ``gen``."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=int, **settings)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **settings: Any,
) -> Expr:
    """Generate a string in quotes; ``settings`` are those of ``gen``."""
    return gen(name, max_tokens, n=n, stop=stop, dtype=str, **settings)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Expr:
    """Let the model choose one of ``choices``: the best by ``choices_method``, by default the highest log-probability
    per token.

    The prompt is computed once for all choices. ``temperature`` is accepted for programs that pass it, and must be 0.
    Raises ``ValueError``.
    """
    if not choices or isinstance(choices, str) or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"choices is {choices!r:.80}; allowed: a list of at least one text, none of them empty")
    if temperature > 0:
        raise ValueError(f"temperature of select is {temperature}; allowed: 0, as the best choice is taken")
    return Select(name, tuple(choices), choices_method or token_length_normalized)


def role(name: str, expr: object = None) -> Expr:
    """Make a message of the role ``name``."""
    return joined(RoleBegin(name), "" if expr is None else expr, RoleEnd(name))


def system(expr: object = None) -> Expr:
    """Make a system message."""
    return role("system", expr)


def user(expr: object = None) -> Expr:
    """Make a user message."""
    return role("user", expr)


def assistant(expr: object = None) -> Expr:
    """Make an assistant message; a ``gen(...)`` inside is generated by the model."""
    return role("assistant", expr)


def system_begin() -> Expr:
    """Begin a system message."""
    return RoleBegin("system")


def system_end() -> Expr:
    """End a system message."""
    return RoleEnd("system")


def user_begin() -> Expr:
    """Begin a user message."""
    return RoleBegin("user")


def user_end() -> Expr:
    """End a user message."""
    return RoleEnd("user")


def assistant_begin() -> Expr:
    """Begin an assistant message."""
    return RoleBegin("assistant")


def assistant_end() -> Expr:
    """End an assistant message."""
    return RoleEnd("assistant")


def image(expr: str | bytes | os.PathLike[str]) -> Expr:
    """Append a picture, given as its path, address or bytes. Backends without vision models reject the call that
    follows."""
    return Image(expr)


def separate_reasoning(expr: object = None, model_type: str | None = None) -> Expr:
    """Separate the reasoning of each generation inside: ``s["x"]`` is the answer and ``s["x_reasoning_content"]`` the
    reasoning before it.

    Only the answer stays in the prompt. ``model_type`` names the kind of model whose marks enclose the reasoning; None
    stands for ``<think>``.
    """
    begin, end = marks_of(model_type)
    return SeparateReasoning(_expression("" if expr is None else expr), begin, end)


def _constraint(
    dtype: type | str | None, regex: str | None, schema: str | Mapping[str, Any] | None
) -> tuple[str, str] | None:
    given = {"dtype": dtype, "regex": regex, "json_schema": schema}
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise ValueError(f"gen(...) has {' and '.join(names)}; only one constraint is allowed")
    if dtype is not None:
        name = dtype if isinstance(dtype, str) else dtype.__name__
        if name not in _DTYPES:
            raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(_DTYPES)}")
        return "regex", _DTYPES[name]
    if regex is not None:
        return "regex", regex
    if schema is not None:
        return "json_schema", schema if isinstance(schema, str) else json.dumps(schema)
    return None

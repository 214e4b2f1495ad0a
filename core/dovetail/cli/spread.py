"""Let commands take a dataclass of options as one parameter. It is used for options that several commands share, and for
long lists of options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from inspect import Parameter
from typing import Any, get_type_hints


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """Return ``command`` in the form that typer needs.

    The first parameter of ``command`` must be a dataclass whose fields are annotated as options. These options replace
    it in the signature.
    """
    first, *others = inspect.signature(command, eval_str=True).parameters.values()
    record, hints = first.annotation, get_type_hints(first.annotation, include_extras=True)
    options = [
        Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name])
        for field in dataclasses.fields(record)
    ]

    @functools.wraps(command)
    def called(**given: Any) -> None:
        command(record(**{option.name: given.pop(option.name) for option in options}), **given)

    own = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in others]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*options, *own)}
    vars(called)["__signature__"] = inspect.Signature([*options, *own])
    return called

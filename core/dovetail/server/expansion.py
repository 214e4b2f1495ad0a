"""From the request of an API to the messages that the engine is told."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator

from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.messages import GenerateMsg
from dovetail.ops.random import derive_seed

_serial = itertools.count()


def messages(request: ApiRequest) -> list[GenerateMsg]:
    """``n`` messages a prompt, prompt by prompt, with ids that never come again."""
    return [msg for prompt in request.prompts for msg in _siblings(request, prompt)]


def _siblings(request: ApiRequest, prompt: Prompt) -> Iterator[GenerateMsg]:
    params = dataclasses.replace(prompt.params, n=1)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    for i in range(prompt.params.n):
        rid = f"{request.rid}/{next(_serial)}"
        yield GenerateMsg(rid, prompt.ids, params, derive_seed(seed, i), request.namespace, request.priority)

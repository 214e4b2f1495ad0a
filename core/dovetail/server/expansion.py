"""From the request of an API to the messages that the engine is told."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from collections.abc import Iterator

from dovetail.errors import RequestError
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.messages import GenerateMsg
from dovetail.ops.random import derive_seed

_serial = itertools.count()


def messages(request: ApiRequest) -> list[GenerateMsg]:
    """``n`` messages a prompt, prompt by prompt, with ids that never come again. Raises ``RequestError``."""
    if request.session and request.num_outputs != 1:
        raise RequestError(
            f"{request.num_outputs} outputs of session {request.session!r:.80}; a session has one at a time",
            param="session",
        )
    return [msg for prompt in request.prompts for msg in _siblings(request, prompt)]


def _siblings(request: ApiRequest, prompt: Prompt) -> Iterator[GenerateMsg]:
    params = dataclasses.replace(prompt.params, n=1)
    seed = secrets.randbits(63) if params.seed is None else params.seed
    rids = [f"{request.rid}/{next(_serial)}" for _ in range(prompt.params.n)]
    group, size = request.group, request.group_size or request.num_outputs
    if not group and len(rids) > 1:
        group, size = f"{rids[0]}/n", len(rids)
    for i, rid in enumerate(rids):
        yield GenerateMsg(
            rid,
            prompt.ids,
            params,
            derive_seed(seed, i),
            request.namespace,
            request.priority,
            group,
            size if group else 1,
            request.session,
        )

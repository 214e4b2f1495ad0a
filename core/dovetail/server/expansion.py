"""Expand the request of an API into messages to the engine."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from dovetail.api.offload import RequestScope, request_scope
from dovetail.errors import RequestError
from dovetail.generation.expansion import expand
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.messages import GenerateMsg

_serial = itertools.count()


def messages(request: ApiRequest, scope: str = "") -> list[GenerateMsg]:
    """Return ``n`` messages for each prompt, prompt by prompt, with ids that are never used again. They begin with
    ``scope`` and the public id of the prompt, or that of the request. Raises ``RequestError``."""
    if request.session and request.num_outputs != 1:
        raise RequestError(
            f"the request is for {request.num_outputs} outputs of session {request.session!r:.80}; a session has one at a time",
            param="session",
        )
    group_size = (request.group_size or request.num_outputs) if request.group else 1
    sender = request_scope()
    return [msg for prompt in request.prompts for msg in _outputs(request, prompt, scope, group_size, sender)]


def seeded(request: ApiRequest, seeds: random.Random) -> ApiRequest:
    """Return ``request`` with the next of ``seeds`` for each prompt that has none."""
    given = [
        prompt
        if prompt.params.seed is not None
        else replace(prompt, params=replace(prompt.params, seed=seeds.getrandbits(63)))
        for prompt in request.prompts
    ]
    return replace(request, prompts=tuple(given))


def _outputs(
    request: ApiRequest, prompt: Prompt, scope: str, group_size: int, sender: RequestScope
) -> list[GenerateMsg]:
    return expand(
        prompt.ids,
        prompt.params,
        [f"{scope}{prompt.rid or request.rid}/{next(_serial)}" for _ in range(prompt.params.n)],
        namespace=request.namespace,
        priority=request.priority,
        group=request.group,
        group_size=group_size,
        session=request.session,
        tenant=sender.tenant,
        weight=sender.weight,
    )

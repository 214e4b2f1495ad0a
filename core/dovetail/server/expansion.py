"""Expand the request of an API into messages to the engine."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import replace

from dovetail.api.offload import RequestScope, request_scope, slices_of
from dovetail.errors import RequestError
from dovetail.generation.expansion import expand
from dovetail.interfaces.api import ApiRequest, Prompt
from dovetail.messages import GenerateMsg

_serial = itertools.count()


def messages(
    request: ApiRequest,
    scope: str = "",
    seeds: random.Random | None = None,
    directory_of: Callable[[str, str], str] = lambda adapter, param: "",
) -> Iterator[list[GenerateMsg]]:
    """Return ``n`` messages for each prompt, prompt by prompt, in parts. Their ids are never used again; they begin with
    ``scope`` and the public id of the prompt, or that of the request. Prompts without a seed get the next of ``seeds``,
    if these are given. ``directory_of`` returns the directory of an adapter, whose name is in the given request field. Raises
    ``RequestError``."""
    if request.session and request.num_outputs != 1:
        raise RequestError(
            f"the request is for {request.num_outputs} outputs of session {request.session!r:.80}; a session has one at a time",
            param="session",
        )
    group_size = (request.group_size or request.num_outputs) if request.group else 1
    sender = request_scope()
    for prompts in slices_of(request.prompts):
        given = prompts if seeds is None else [_seeded(prompt, seeds) for prompt in prompts]
        yield [msg for prompt in given for msg in _outputs(request, prompt, scope, group_size, sender, directory_of)]


def _seeded(prompt: Prompt, seeds: random.Random) -> Prompt:
    """Return ``prompt`` with the next of ``seeds`` if it has none."""
    if prompt.params.seed is not None:
        return prompt
    return replace(prompt, params=replace(prompt.params, seed=seeds.getrandbits(63)))


def _outputs(
    request: ApiRequest,
    prompt: Prompt,
    scope: str,
    group_size: int,
    sender: RequestScope,
    directory_of: Callable[[str, str], str],
) -> list[GenerateMsg]:
    adapter = prompt.adapter or sender.adapter
    param = prompt.adapter_param if prompt.adapter else "model"
    return expand(
        prompt.ids,
        prompt.params,
        [f"{scope}{prompt.rid or request.rid}/{next(_serial)}" for _ in range(prompt.params.n)],
        namespace=request.namespace if prompt.namespace is None else prompt.namespace,
        priority=request.priority,
        group=request.group,
        group_size=group_size,
        session=request.session,
        tenant=sender.tenant,
        weight=sender.weight,
        adapter=adapter,
        adapter_directory=directory_of(adapter, param) if adapter else "",
        adapter_param=param,
    )

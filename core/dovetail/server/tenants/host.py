"""Give one tenant access to the server."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

from dovetail.api.offload import INPUTS_OF_PART, Parts, at_once, in_parts, request_scope, slices_of
from dovetail.chat.parsing import OutputParsers
from dovetail.errors import PermissionDeniedError, QueueFullError, RequestError
from dovetail.interfaces.api import AdapterCard, ApiHost, ApiRequest, ChatPlan, Prompt
from dovetail.interfaces.parsers import ToolRequest
from dovetail.messages import EngineStats
from dovetail.sampling_params import SamplingParams
from dovetail.server.outputs import RequestOutputs, RequestTerms
from dovetail.server.service import Service, tenant_rid
from dovetail.server.tenants.keys import Caller
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.server.tenants.tenant import Lease
from dovetail.server.tenants.usage import UsageEntry, timestamp


class TenantHost(ApiHost):
    """Give one request of one tenant access to the ``Service``: the request is admitted under the tenant's limits, computed in
    the tenant's namespace, and accounted for when it ends, however it ends."""

    def __init__(self, service: Service, tenancy: Tenancy, caller: Caller, path: str, counted: bool) -> None:
        """``path`` is the path of the HTTP request, for the usage log. If the request was not ``counted`` when it arrived, ``submit``
        counts it."""
        self.config = service.config
        self.tokenizer = service.tokenizer
        self.version = service.version
        self.created = service.created
        self.context_len = service.context_len
        self.vocab_size = service.vocab_size
        self.embedding = service.embedding
        self.sampling_defaults = service.sampling_defaults
        self.owner = caller.name
        self._service = service
        self._tenancy = tenancy
        self._tenant = tenancy.tenants[caller.name]
        self._caller = caller
        self._path = path
        self._counted = counted

    @property
    def max_body(self) -> int:
        """Return the largest size of a request body in bytes: the tenant's limit, else the server's."""
        own = self._tenant.limits.max_body_mib
        return self._service.max_body if own is None else int(own * 2**20)

    def submit(self, request: ApiRequest) -> RequestOutputs:
        """See ``Service.submit``. Raises ``RateLimitError`` as well."""
        return at_once(self._submitting(request))

    async def submit_in_parts(self, request: ApiRequest) -> RequestOutputs:
        """See ``Service.submit_in_parts``. Raises ``RateLimitError`` as well."""
        return await in_parts(self._submitting(request), len(request.prompts))

    def _submitting(self, request: ApiRequest) -> Parts[RequestOutputs]:
        tenant, server = self._tenant, self.config.server
        request = self._service.with_length(request)
        if not self._counted:
            tenant.arrive()
        prompt_tokens = new_tokens = 0
        placed: list[Prompt] = []
        for prompts in slices_of(request.prompts):
            prompt_tokens += sum(len(prompt.ids) for prompt in prompts)
            new_tokens += sum(map(self._most_new, prompts))
            placed += map(self._own, prompts)
            if len(prompts) == INPUTS_OF_PART:
                yield
        own = replace(
            request,
            prompts=tuple(placed),
            namespace=tenant.namespace(request.namespace),
            priority=tenant.priority(request.priority),
        )
        lease = tenant.admit(request.num_outputs, prompt_tokens, new_tokens)
        seconds = server.max_seconds if tenant.limits.max_seconds is None else tenant.limits.max_seconds
        terms = RequestTerms(
            tenant_rid(tenant.name, request.rid),
            seconds,
            tenant.name,
            lambda outputs: self._closed(outputs, lease, request),
        )
        try:
            return (yield from self._service.submitting(own, terms))
        except BaseException:
            lease.settle(0)
            raise

    @property
    def paused(self) -> bool:
        """See ``Service.paused``."""
        return self._service.paused

    @property
    def parsers(self) -> OutputParsers:
        """See ``Service.parsers``."""
        return self._service.parsers

    async def fresh_stats(self) -> EngineStats:
        """See ``Service.fresh_stats``."""
        return await self._service.fresh_stats()

    def _own(self, prompt: Prompt) -> Prompt:
        """Return ``prompt`` with its namespace within the tenant's, if it has one of its own."""
        if prompt.namespace is None:
            return prompt
        return replace(prompt, namespace=self._tenant.namespace(prompt.namespace))

    def _most_new(self, prompt: Prompt) -> int:
        free = max(self.context_len - len(prompt.ids), 0)
        requested = prompt.params.max_new_tokens
        return prompt.params.n * (free if requested is None else min(requested, free))

    def _closed(self, outputs: RequestOutputs, lease: Lease, request: ApiRequest) -> None:
        usage = outputs.usage
        made = usage.completion + outputs.unread
        refused = isinstance(outputs.error, RequestError | QueueFullError) and not made
        lease.settle(0 if refused else usage.prompt + made)
        if not refused:
            used = self._tenant.used
            used.requests += 1
            used.prompt_tokens += usage.prompt
            used.cached_tokens += usage.cached
            used.completion_tokens += made
        if self._tenancy.log is not None:
            self._tenancy.log.write(self._entry(outputs, made, request, refused))

    def _entry(self, outputs: RequestOutputs, made: int, request: ApiRequest, refused: bool) -> UsageEntry:
        usage, texts = outputs.usage, self._tenancy.log_texts
        left = None if outputs.finished else "ClientDisconnect"
        return UsageEntry(
            time=timestamp(time.time()),
            tenant=self._tenant.name,
            key=self._caller.key,
            rid=outputs.rid,
            path=self._path,
            outputs=len(outputs.choices),
            prompt_tokens=0 if refused else usage.prompt,
            cached_tokens=0 if refused else usage.cached,
            completion_tokens=made,
            seconds=round(outputs.elapsed, 6),
            finish=[choice.finish.kind.value for choice in outputs.choices if choice.finish is not None],
            error=type(outputs.error).__name__ if outputs.error is not None else left,
            prompts=[self.tokenizer.decode(prompt.ids) for prompt in request.prompts] if texts else None,
            texts=[choice.text for choice in outputs.choices] if texts else None,
        )

    def abort(self, rid: str) -> bool:
        """Abort a request of this tenant. Return False if there is no such request."""
        return self._service.engine.abort(tenant_rid(self._tenant.name, rid))

    def check_model(self, name: str | None) -> None:
        """See ``Service.check_model``. Raises ``PermissionDeniedError`` for an adapter that the tenant may not use."""
        self._service.check_model(name)
        if adapter := request_scope().adapter:
            self.check_adapter(adapter)

    @property
    def model_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See ``Service.model_name``."""
        return self._service.model_name

    def check_adapter(self, name: str) -> None:
        """See ``Service.check_adapter``. Raises ``PermissionDeniedError`` if the tenant may not use the adapter."""
        self._service.check_adapter(name)
        if not self._may_use(name):
            raise PermissionDeniedError(f"the key does not permit the adapter {name!r:.200}; its tenant may not use it")

    def adapters(self) -> Sequence[AdapterCard]:
        """See ``Service.adapters``."""
        return [card for card in self._service.adapters() if self._may_use(card.name)]

    def _may_use(self, adapter: str) -> bool:
        allowed = self._tenant.limits.adapters
        return allowed is None or any(fnmatchcase(adapter, pattern) for pattern in allowed)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """See ``Service.encode``."""
        return await self._service.encode(text, add_special_tokens)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        add_generation_prompt: bool = True,
        opening: str = "",
    ) -> str:
        """See ``Service.render_chat``."""
        return await self._service.render_chat(messages, tools, extra, add_generation_prompt, opening)

    def plan_chat(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """See ``Service.plan_chat``."""
        return self._service.plan_chat(params, prompt, tools, separate_reasoning)

    def output_limit(self, ids: Sequence[int], default: int) -> int:
        """See ``Service.output_limit``."""
        return self._service.output_limit(ids, default)

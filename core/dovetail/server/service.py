"""Hold what all routes share: the engine, the tokenizer, the model's name, and the submission of requests."""

from __future__ import annotations

import asyncio
import importlib.metadata
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dovetail.api.offload import (
    INPUTS_OF_PART,
    ByteBudget,
    Intake,
    Offload,
    Parts,
    at_once,
    in_parts,
    offloaded,
    request_scope,
    slices_of,
)
from dovetail.api.problems import DrainingError, UnknownModelError
from dovetail.api.requests import check_logprobs, with_output_limit
from dovetail.chat.parsing import OutputParsers
from dovetail.config import Config
from dovetail.errors import ContextLengthError, EngineDeadError, RequestError
from dovetail.generation.prompts import PromptHooks
from dovetail.interfaces.api import AdapterCard, ApiHost, ApiRequest, ChatPlan, Prompt
from dovetail.interfaces.parsers import ToolRequest
from dovetail.messages import ContinueMsg, EngineStats, ExpertLoadMsg, GenerateMsg, PauseMsg
from dovetail.sampling_params import SamplingParams
from dovetail.server.adapters import ServedAdapters
from dovetail.server.answers import AnswerLimit
from dovetail.server.engines import EngineHandle
from dovetail.server.expansion import messages
from dovetail.server.metrics import Metrics, RequestMetrics, without_gauges
from dovetail.server.outputs import GrowingChoice, RequestOutputs, RequestTerms, growing_choices
from dovetail.server.tracing import current_trace
from dovetail.templates.renderer import TemplateRenderer
from dovetail.token_checks import check_prompt
from dovetail.tokenizer import MarkedPrompt, Tokenizer
from dovetail.tokenizer.content import pickled_size
from dovetail.tokenizer.tokenizer import ChatRendering

_LARGE = 16_384
_LARGE_CALLS = 1 << 16
"""The number of characters from which text is tokenized in a thread, so that other streams are served meanwhile."""


class Service(ApiHost):
    """Hold the shared state of one server. While ``draining`` is set, new requests are refused and the running ones finish.
    ``tenants`` are the names of the server's tenants. ``templates`` renders chats; None renders them in this process, without bounds. ``problem`` returns what is wrong though requests are served, or None."""

    def __init__(
        self, config: Config, engine: EngineHandle, tokenizer: Tokenizer, metrics: Metrics, parsers: OutputParsers
    ) -> None:
        """``engine`` must have been started."""
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.parsers = parsers
        self.tenants: Collection[str] = ()
        self.prompts = PromptHooks()
        self.templates: TemplateRenderer | None = None
        self.created = int(time.time())
        self.draining = False
        self.problem: Callable[[], str | None] = lambda: None
        seed = config.server.seed
        self._logs = config.server.log_requests
        self._seeds = None if seed is None else random.Random(seed)
        self.tasks: set[asyncio.Task[None]] = set()  # background work of routes
        self._paused_pid: int | None = None
        self.version = package_version()
        self.served_adapters = ServedAdapters(config, engine)
        self.context_len: int = engine.info["context_len"]
        self.embedding: Mapping[str, Any] | None = engine.info.get("embedding")
        self.vocab_size: int = engine.info["resolved"]["model"]["vocab_size"]
        recommended = dict(engine.info["resolved"].get("sampling_defaults", {}))
        self._most_new: int | None = recommended.pop("max_new_tokens", None)
        self.sampling_defaults: Mapping[str, Any] = recommended
        limits = config.server.limits
        bodies, answer = limits.bodies_mib * 2**20, limits.answer_mib * 2**20
        self._answers = AnswerLimit(answer, self.context_len, (self.embedding or {}).get("size", 0))
        self.intake = Intake(
            limits.body_seconds, ByteBudget(bodies, bodies / 2), ByteBudget(8 * answer, 2 * answer), Offload()
        )

    @property
    def model_name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Return the name of the adapter that the current request names as its model, or that of the model."""
        return request_scope().adapter or self.config.model.name

    @property
    def max_body(self) -> int:
        """Return the largest size of a request body in bytes."""
        return int(self.config.server.max_body_mib * 2**20)

    def submit(self, request: ApiRequest, terms: RequestTerms | None = None) -> RequestOutputs:
        """Send a request to the engine, by default under the server's own terms, and return its outputs. Raises
        ``DrainingError``, ``EngineDeadError`` or ``RequestError``."""
        return at_once(self.submitting(request, terms))

    async def submit_in_parts(self, request: ApiRequest, terms: RequestTerms | None = None) -> RequestOutputs:
        """Do as ``submit``, but let other requests go on while a request with thousands of prompts is prepared."""
        return await in_parts(self.submitting(request, terms), len(request.prompts))

    def submitting(self, request: ApiRequest, terms: RequestTerms | None = None) -> Parts[RequestOutputs]:
        """Do the work of ``submit`` in parts. The request is sent to the engine after the last part."""
        self.check_ready()
        request = self.with_length(request)
        most = self.config.scheduler.max_waiting
        if request.num_outputs > most:
            raise RequestError(
                f"the request asks for {request.num_outputs} outputs; at most {most} may wait", param="n"
            )
        terms = terms or RequestTerms(max_seconds=self.config.server.max_seconds)
        self.engine.check(request_scope().tenant, request.num_outputs)
        size = 0
        for prompts in slices_of(request.prompts):
            for prompt in prompts:
                check_prompt(prompt.ids, prompt.params, self.context_len, self.vocab_size)
                check_logprobs(self, prompt.params)
            size += sum(self._answers.outputs(prompt, request.number_bytes) for prompt in prompts)
            if len(prompts) == INPUTS_OF_PART:
                yield
        request_scope().expect_answer(self._answers.check(request, size))
        if any(prompt.params.thinking_budget is not None for prompt in request.prompts):
            request = self._with_thinking_budgets(request)
        trace = current_trace()
        if trace is not None:
            request = trace.timed(request)
        name = terms.name or request.rid
        scope = name.removesuffix(request.rid)
        msgs: list[GenerateMsg] = []
        choices: list[GrowingChoice] = []
        for part in messages(request, scope, self._seeds, self.served_adapters.directory):
            choices += growing_choices(request, part, self.tokenizer, len(msgs))
            msgs += part
            if len(part) >= INPUTS_OF_PART:
                yield
        if len(msgs) >= INPUTS_OF_PART:  # an adapter may have been unloaded between two parts
            self.served_adapters.check_loaded(msgs)
        stream = self.engine.open(name, msgs)
        metrics = RequestMetrics(self.metrics, request.prompts)
        outputs = RequestOutputs(request, msgs, choices, stream, metrics, terms, self._logs)
        outputs.most_bytes = self._answers.most
        if trace is not None:
            trace.follow(request, outputs, self.model_name, terms.tenant)
        return outputs

    @property
    def paused(self) -> bool:
        """Return True while generation is paused. An engine process that was started anew is not paused."""
        return self._paused_pid is not None and self._paused_pid == self.engine.pid

    async def pause(self, paused: bool) -> None:
        """Pause generation, or continue it. Raises ``EngineDeadError``."""
        await self.engine.command(PauseMsg("") if paused else ContinueMsg(""))
        self._paused_pid = self.engine.pid if paused else None

    @property
    def status(self) -> str:
        """Return the state of the server in one word."""
        if self.draining:
            return "draining"
        if not self.engine.alive:
            return "restarting" if self.engine.restarting else "dead"
        if self.engine.stalled:
            return "stalled"
        return "paused" if self.paused else "ready"

    def with_length(self, request: ApiRequest) -> ApiRequest:
        """Return ``request`` with the model's own ``max_new_tokens`` for the prompts that set none, as far as it fits into
        the context."""
        most = self._most_new
        if most is None or all(prompt.params.max_new_tokens is not None for prompt in request.prompts):
            return request
        limited = (
            replace(prompt, params=with_output_limit(prompt.params, self.output_limit(prompt.ids, most)))
            for prompt in request.prompts
        )
        return replace(request, prompts=tuple(limited))

    def _with_thinking_budgets(self, request: ApiRequest) -> ApiRequest:
        """Return ``request`` with the span of the reasoning that each prompt's ``thinking_budget`` limits."""

        def spanned(prompt: Prompt) -> Prompt:
            text = self.tokenizer.decode(prompt.ids, skip_special_tokens=False)
            return replace(prompt, params=self.parsers.with_thinking_budget(prompt.params, text))

        return replace(request, prompts=tuple(map(spanned, request.prompts)))

    def check_ready(self) -> None:
        """Raise ``DrainingError`` or ``EngineDeadError`` if no request can be accepted."""
        if self.draining:
            raise DrainingError("the server is shutting down and accepts no more requests")
        if not self.engine.alive:
            what_next = (
                "it is being started again, retry later" if self.engine.restarting else "the server must be restarted"
            )
            raise EngineDeadError(
                f"the engine process has ended: {self.engine.failure or 'it was stopped'}; {what_next}"
            )
        if self.engine.stalled:
            raise EngineDeadError("the engine gives no sign of life; retry later")

    def check_model(self, name: str | None) -> None:
        """Raise ``UnknownModelError`` for a model that is not served; None and "" stand for the served model."""
        model, scope = self.config.model, request_scope()
        scope.adapter = ""
        if name and not model.is_served(name):
            base, _, adapter = name.partition(":")
            of_base = model.is_served(base) and name not in self.served_adapters.cards
            scope.adapter = adapter if of_base and adapter in self.served_adapters.cards else name
            self.check_adapter(scope.adapter)
        trace = current_trace()
        if trace is not None:
            trace.model = name or None

    def check_adapter(self, name: str) -> None:
        """See ``ApiHost.check_adapter``."""
        model = self.config.model
        if name not in self.served_adapters.cards:
            raise UnknownModelError(name, model.names, model.aliases, len(self.served_adapters.cards))

    def adapters(self) -> Sequence[AdapterCard]:
        """See ``ApiHost.adapters``."""
        return [*self.served_adapters.cards.values()]

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``. Long texts are encoded in a thread, so that they do not block the event loop. Raises
        ``ContextLengthError``."""
        heavy = len(text) >= _LARGE or isinstance(text, MarkedPrompt)  # the first of these builds another tokenizer
        return await offloaded(heavy, self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if add_special_tokens:  # a rendered chat is encoded without them; its messages have passed the hooks
            text = self.prompts.text(text)
        if self.tokenizer.surely_exceeds(text, self.context_len):
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which are more than {self.context_len} tokens; the context "
                f"holds {self.context_len} tokens, prompt and output together"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        add_generation_prompt: bool = True,
        opening: str = "",
    ) -> str:
        """See ``ApiHost.render_chat``."""
        large = sum(len(message["content"]) + 64 for message in messages) >= _LARGE
        large = large or pickled_size(messages, tools, extra) >= _LARGE_CALLS  # with tools, calls and variables
        rendering = await offloaded(
            large, self._rendering, messages, tools or None, extra, add_generation_prompt, opening
        )
        if self.templates is None:
            return rendering.prompt(await offloaded(large, rendering.template.render, rendering.variables))
        scope, on_thread = request_scope(), partial(offloaded, True)
        return rendering.prompt(
            await self.templates.render(rendering.variables, large, on_thread, scope.tenant, scope.weight)
        )

    def _rendering(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
        opened: bool,
        opening: str,
    ) -> ChatRendering:
        messages = self.prompts.messages(messages)
        return self.tokenizer.chat_rendering(messages, tools, opened, extra, opening, self.parsers.assistant_marks)

    def plan_chat(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """Return how the outputs of this prompt are constrained and read. See ``OutputParsers.plan``."""
        return self.parsers.plan(params, prompt, tools, separate_reasoning)

    def abort(self, rid: str) -> bool:
        """Abort the request with this public id, of any tenant. Return False if there is no such request."""
        names = (rid, *(tenant_rid(tenant, rid) for tenant in self.tenants))
        return sum(map(self.engine.abort, names)) > 0  # two tenants may have chosen one id

    def output_limit(self, ids: Sequence[int], default: int) -> int:
        """Return the output length of a request that sets none: ``default``, or the rest of the context if that is shorter."""
        return max(min(default, self.context_len - len(ids)), 1)

    async def fresh_stats(self, seconds: float = 1.0) -> EngineStats:
        """Return the engine's current numbers, or the last known ones if it does not answer within ``seconds`` or has ended."""
        with suppress(TimeoutError, EngineDeadError):
            self.metrics.stats = await asyncio.wait_for(self.engine.stats(), seconds)
        if not self.engine.alive:
            self.metrics.stats = without_gauges(self.metrics.stats)
        return self.metrics.stats

    async def fresh_expert_tokens(self, seconds: float = 1.0) -> Mapping[int, list[int]]:
        """Return the tokens of each expert by layer (``metrics.expert_load``), or the last known ones if the engine does not
        answer within ``seconds`` or has ended."""
        with suppress(TimeoutError, EngineDeadError):
            reply = await asyncio.wait_for(self.engine.command(ExpertLoadMsg("")), seconds)
            if reply.ok:
                self.metrics.expert_tokens = reply.expert_tokens
        return self.metrics.expert_tokens


def tenant_rid(tenant: str, rid: str) -> str:
    """Return the engine's id of the request ``rid`` of a tenant, so that two tenants may choose the same id."""
    return f"{tenant}:{rid}"


def package_version() -> str:
    """Return the version of the installed distribution."""
    return importlib.metadata.version("dovetail")


def info_labels(version: str, model: str, info: Mapping[str, Any]) -> dict[str, str]:
    """Return the labels of the ``dovetail_info`` gauge: version, model, and the component chosen for each slot."""
    chosen = info["resolved"]["chosen"]
    parts = {slot.replace(".", "_"): part["name"] if part else "none" for slot, part in chosen.items()}
    return {"version": version, "served_model": model, **parts}

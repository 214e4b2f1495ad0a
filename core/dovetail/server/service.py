"""What every route shares: the engine, the tokenizer, the model's name, and the way to submit a request."""

from __future__ import annotations

import asyncio
import importlib.metadata
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

from dovetail.api.problems import DrainingError, UnknownModelError
from dovetail.chat.parsing import OutputParsers
from dovetail.config import Config
from dovetail.errors import ContextLengthError, EngineDeadError, RequestError
from dovetail.interfaces.api import ApiHost, ApiRequest, ChatPlan
from dovetail.interfaces.parsers import ToolRequest
from dovetail.messages import EngineStats
from dovetail.sampling_params import SamplingParams
from dovetail.server.engines import EngineHandle
from dovetail.server.expansion import messages
from dovetail.server.metrics import Metrics, RequestMetrics
from dovetail.server.outputs import RequestOutputs, RequestTerms
from dovetail.token_checks import check_prompt
from dovetail.tokenizer import Tokenizer

P = ParamSpec("P")
T = TypeVar("T")

_LARGE = 16_384
"""Characters from which on text is tokenized in a thread, so that other streams go on meanwhile."""


class Service(ApiHost):
    """One server's shared state. ``draining`` refuses new requests while the running ones finish; ``tenants`` are their names."""

    def __init__(
        self, config: Config, engine: EngineHandle, tokenizer: Tokenizer, metrics: Metrics, parsers: OutputParsers
    ) -> None:
        """``engine`` has been started."""
        self.config = config
        self.engine = engine
        self.tokenizer = tokenizer
        self.metrics = metrics
        self.parsers = parsers
        self.tenants: Collection[str] = ()
        self.created = int(time.time())
        self.draining = False
        self.version = package_version()
        self.model_name = config.model.name
        self.context_len: int = engine.info["context_len"]
        self.embedding: Mapping[str, Any] | None = engine.info.get("embedding")
        self.vocab_size: int = engine.info["resolved"]["model"]["vocab_size"]

    @property
    def max_body(self) -> int:
        """Bytes that a request body may have."""
        return int(self.config.server.max_body_mib * 2**20)

    def submit(self, request: ApiRequest, terms: RequestTerms | None = None) -> RequestOutputs:
        """Send a request to the engine, by default under the server's own terms. Raises ``DrainingError``, ``EngineDeadError``
        or ``RequestError``."""
        self.check_ready()
        most = self.config.scheduler.max_waiting
        if request.num_outputs > most:
            raise RequestError(
                f"the request asks for {request.num_outputs} outputs; at most {most} may wait", param="n"
            )
        for prompt in request.prompts:
            check_prompt(prompt.ids, prompt.params, self.context_len, self.vocab_size)
        msgs = messages(request)
        terms = terms or RequestTerms(max_seconds=self.config.server.max_seconds)
        stream = self.engine.open(terms.name or request.rid, msgs)
        return RequestOutputs(request, msgs, stream, self.tokenizer, RequestMetrics(self.metrics), terms)

    def check_ready(self) -> None:
        """Raises ``DrainingError`` or ``EngineDeadError`` where no request can be taken."""
        if self.draining:
            raise DrainingError("the server is shutting down and takes no more requests")
        if not self.engine.alive:
            raise EngineDeadError(
                f"the engine process has ended: {self.engine.failure or 'it was stopped'}; the server must be restarted"
            )

    def check_model(self, name: str | None) -> None:
        """Raises ``UnknownModelError`` for a model that is not served here; None stands for the one that is."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(name, self.model_name)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; long texts do not hold up the event loop. Raises ``ContextLengthError``."""
        return await _in_thread(len(text) >= _LARGE, self._encode, text, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self.tokenizer.surely_exceeds(text, self.context_len):
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, which are more than {self.context_len} tokens; the context "
                f"holds {self.context_len} tokens, prompt and output together"
            )
        return self.tokenizer.encode(text, add_special_tokens)

    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation, the assistant's turn opened; encode it without special tokens. Raises
        ``RequestError``."""
        large = sum(len(message["content"]) + 64 for message in messages) >= _LARGE
        return await _in_thread(large, self.tokenizer.apply_chat_template, messages, tools or None, True, extra)

    def plan_chat(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """How the answers to this prompt are constrained and read; raises as ``OutputParsers.plan``."""
        return self.parsers.plan(params, prompt, tools, separate_reasoning)

    def abort(self, rid: str) -> bool:
        """End the request with this public id, whoever sent it; False if there is none."""
        names = (rid, *(own_rid(tenant, rid) for tenant in self.tenants))
        return sum(map(self.engine.abort, names)) > 0  # two tenants may have chosen one id

    def output_limit(self, ids: Sequence[int], default: int) -> int:
        """The output length where the request sets none: ``default``, or what is left of the context."""
        return max(min(default, self.context_len - len(ids)), 1)

    async def fresh_stats(self, seconds: float = 1.0) -> EngineStats:
        """The engine's numbers now, or the last known where it is in a long step or dead."""
        with suppress(TimeoutError, EngineDeadError):
            self.metrics.stats = await asyncio.wait_for(self.engine.stats(), seconds)
        return self.metrics.stats


async def _in_thread(large: bool, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    return await asyncio.to_thread(call, *args, **kwargs) if large else call(*args, **kwargs)


def own_rid(owner: str, rid: str) -> str:
    """How the engine knows the request ``rid`` of a tenant: two tenants may choose one id, and see nothing of it."""
    return f"{owner}:{rid}"


def package_version() -> str:
    """The version of the installed distribution."""
    return importlib.metadata.version("dovetail")


def info_labels(version: str, model: str, info: Mapping[str, Any]) -> dict[str, str]:
    """Labels of the ``dovetail_info`` gauge: what is served, and the component chosen for each slot."""
    chosen = info["resolved"]["chosen"]
    parts = {slot.replace(".", "_"): part["name"] if part else "none" for slot, part in chosen.items()}
    return {"version": version, "served_model": model, **parts}

"""Protocols spoken over HTTP: a plugin translates its requests to ``ApiRequest`` and what comes of them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.requests import Request
    from starlette.responses import Response

    from dovetail.config import Config
    from dovetail.interfaces.parsers import CallDelta, ToolRequest
    from dovetail.sampling_params import SamplingParams
    from dovetail.tokenizer import Tokenizer
    from dovetail.types import Acceptance, FinishReason, FloatArray, TokenLogprob


class ChatDelta(NamedTuple):
    """What new text of a chat's output turned out to be."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ChatReader(Protocol):
    """Takes one output of a chat apart as it grows; ``calls`` are the tool calls so far."""

    calls: int

    def take(
        self, text: str, finish: FinishReason | None, num_tokens: int
    ) -> tuple[list[ChatDelta], FinishReason | None]:
        """Add what the engine sent: ``text``, after which there are ``num_tokens``, and why it has ended. Returns what it
        turned out to be, and the end: a stop string that is found here ends the output where the engine has not."""
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids and how to continue them; ``params.n`` outputs are made."""

    ids: list[int]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What one HTTP request asks for, whichever API it came through. ``rid`` is its public id, ``continues`` whether the
    output's text follows on the prompt's (a completion) or starts anew (a chat). ``reader`` makes who takes an output apart,
    where it is a chat's. ``namespace`` keeps its cached prefixes apart from those of others. ``group`` and ``session`` are hints
    for the engine (see ``messages.GenerateMsg``); a group has ``group_size`` outputs, 0 standing for those of this request.
    The outputs of one prompt are a group where none is named."""

    rid: str
    prompts: tuple[Prompt, ...]
    continues: bool = True
    namespace: str = ""
    priority: int = 0
    reader: Callable[[], ChatReader] | None = None
    group: str = ""
    group_size: int = 0
    session: str = ""

    @property
    def num_outputs(self) -> int:
        """How many sequences are generated."""
        return sum(prompt.params.n for prompt in self.prompts)


def _nothing_drafted() -> Acceptance:
    from dovetail.types import Acceptance  # which imports numpy: the registry shows APIs without it

    return Acceptance()


@dataclass(slots=True, eq=False)
class Choice:
    """One output, which grows. ``text`` and ``token_ids`` are all of it so far; ``logprobs`` has an entry per token, where
    asked. ``parts`` are what the text of a chat's turned out to be, of which ``calls`` are tool calls.

    The stop token that ended it is among ``token_ids`` and not in ``text``. A stop string is cut off, with what follows.
    ``visible_logprobs`` leaves out that of a stop token which is not in the text. ``pooled`` is what the prompt was made into,
    where its params have ``pooling``, once it has finished.
    """

    index: int
    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    grammar_backend: str | None = None
    acceptance: Acceptance = field(default_factory=_nothing_drafted)
    parts: list[ChatDelta] = field(default_factory=list)
    calls: int = 0
    keeps_stop: bool = False
    pooled: FloatArray | None = None

    @property
    def visible_logprobs(self) -> list[TokenLogprob]:
        """``logprobs`` without that of a stop token which is not in the text; asked of a finished output."""
        assert self.finish is not None
        return self.logprobs[:-1] if isinstance(self.finish.matched, int) and not self.keeps_stop else self.logprobs


class Delta(NamedTuple):
    """What one step added to a choice. ``logprobs`` leaves out a stop token that is not in the text. ``finish`` is set in
    the choice's last."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: FinishReason | None
    parts: Sequence[ChatDelta] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; each prompt counts once, however many outputs it has. ``acceptance`` is of all outputs."""

    prompt: int
    completion: int
    cached: int
    acceptance: Acceptance


class Generation(Protocol):
    """All outputs of one request: iterate for the deltas of each engine step, or ``wait`` for the end.

    Leaving it early (``close``, or the end of its ``with`` block) aborts what still runs; it must be left.
    """

    rid: str

    @property
    def choices(self) -> Sequence[Choice]:
        """The outputs, prompt by prompt."""
        ...

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        ...

    @property
    def elapsed(self) -> float:
        """Seconds since the request arrived."""
        ...

    def __enter__(self) -> Generation: ...

    def __exit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> list[Delta]:
        """The deltas of the engine's steps since the last call. Raises what ended a request otherwise."""
        ...

    async def wait(self) -> None:
        """Until every choice has finished."""
        ...

    def close(self) -> None:
        """Abort what still runs."""
        ...


class ChatPlan(Protocol):
    """How the outputs of one chat are constrained and read: make the request with its ``params`` and its ``reader``."""

    @property
    def params(self) -> SamplingParams:
        """With the constraint that the tools need."""
        ...

    @property
    def tools(self) -> ToolRequest | None:
        """The tools that may be called."""
        ...

    def reader(self) -> ChatReader:
        """For one output."""
        ...


class ApiHost(ABC):
    """The server, as the handlers of an API see it: the view of whoever sent the request."""

    config: Config
    tokenizer: Tokenizer
    version: str
    model_name: str
    created: int
    """When the server started, in seconds since the epoch."""
    context_len: int
    vocab_size: int
    embedding: Mapping[str, Any] | None
    """What ``dovetail.ops.vectors.pooling_kind`` wants to know of the model's embeddings; None where it has none."""
    owner: str = ""
    """Whom this view belongs to: what an API keeps between requests, it shows to the same owner only. Empty where the server has
    no tenants."""

    @property
    @abstractmethod
    def max_body(self) -> int:
        """Bytes that a request body may have; for ``dovetail.api.body.parse``."""

    @abstractmethod
    def submit(self, request: ApiRequest) -> Generation:
        """Send a request to the engine; one of a session has one output. Raises ``DrainingError``, ``EngineDeadError`` or ``RequestError``."""

    @abstractmethod
    def check_model(self, name: str | None) -> None:
        """Raises ``UnknownModelError`` for a model that is not served here; None stands for the one that is."""

    @abstractmethod
    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of ``text``; long texts do not hold up other requests. Raises ``ContextLengthError``."""

    @abstractmethod
    async def render_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> str:
        """The prompt of a conversation, the assistant's turn opened; encode it without special tokens. ``messages`` are as
        ``dovetail.chat.requests.plain_message`` makes them, ``extra`` are arguments of the template. Raises ``RequestError``."""

    @abstractmethod
    def plan_chat(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """How the answers to this prompt are constrained and read. Raises ``RequestError`` where ``tools`` cannot be read or
        enforced."""

    @abstractmethod
    def output_limit(self, ids: Sequence[int], default: int) -> int:
        """The output length where the request sets none: ``default``, or what is left of the context."""

    @abstractmethod
    def abort(self, rid: str) -> bool:
        """End the request with this public id: it is answered with finish reason ``abort``. False if there is none."""


Handler = Callable[[ApiHost, "Request"], Awaitable["Response"]]
"""Answers one HTTP request. What it raises is answered by ``Api.error``."""


class Route(NamedTuple):
    """One row of an API. The handler's docstring is its summary in /docs, ``body`` its request's schema, ``query`` that of what
    stands behind the question mark. ``answers`` are the media types of its answers, that of a stream among them."""

    methods: Sequence[str]
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    answers: Sequence[str] = ("application/json",)


@dataclass(frozen=True, slots=True)
class ApiProblem:
    """Why a request was not answered: the HTTP status, a message for who reads it, a stable ``code``, the ``param`` at fault,
    and after how many seconds it may be sent again."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


class Api(ABC):
    """One protocol. Built once for each server; its handlers may run at the same time, in one event loop, and must not block it.

    ``claims`` are the prefixes of paths below which errors have this API's format, also those of routes that do not exist;
    the longest that holds counts.
    """

    claims: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: BaseModel) -> None:
        """``config`` is this API's own section."""

    @abstractmethod
    def routes(self) -> Sequence[Route]:
        """What it answers."""

    def error(self, problem: ApiProblem) -> object:
        """The JSON body of an error answer."""
        return {"error": {"message": problem.message}}

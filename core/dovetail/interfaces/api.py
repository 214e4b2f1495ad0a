"""Define API plugins, which translate HTTP requests to ``ApiRequest`` and the engine's outputs back to HTTP responses.

A request takes this path: the server finds the ``Route`` and calls its handler with an ``ApiHost`` and the HTTP
request. The handler validates the body, renders and encodes the prompt, builds an ``ApiRequest``, and passes it to
``ApiHost.submit``. It then reads the returned ``Generation`` and answers, either whole or as a stream. The server turns
exceptions of the handler into an ``ApiProblem``, and ``Api.error`` formats it.
"""

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
    from dovetail.types import FinishReason, FloatArray, TokenLogprob


JSON_NUMBER_BYTES = 22
"""The size of a float32 that is written in JSON with all its digits, a comma included."""


class ChatDelta(NamedTuple):
    """Hold the reasoning, the content and the parts of tool calls that were found in new text of a chat's output."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()


class ChatReader(Protocol):
    """Separate one output of a chat into reasoning, content and tool calls while it grows. ``calls`` is the number of
    tool calls found so far."""

    calls: int

    def take(
        self, text: str, finish: FinishReason | None, num_tokens: int
    ) -> tuple[list[ChatDelta], FinishReason | None]:
        """Add a piece of the output: ``text``, the reason ``finish`` for which the engine has ended the output (None if
        it continues), and ``num_tokens``, the number of tokens up to the end of ``text``.

        Return the parts found in the text, in order, and the finish reason. The finish reason is ``finish``, unless the
        reader finds a stop string. In that case the output ends at the stop string even if the engine has not ended it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Prompt:
    """Hold the token ids of a prompt and the parameters for its continuation. ``params.n`` outputs are generated.
    ``rid`` is their public id if it is not that of the request; they can be aborted by both. ``adapter`` is a name that
    ``ApiHost.check_adapter`` has accepted; by default it is the adapter that the request names as its model, if any.
    ``adapter_param`` is the request field that has this name, for errors. ``namespace`` is by default that of the request."""

    ids: list[int]
    params: SamplingParams
    rid: str = ""
    adapter: str = ""
    namespace: str | None = None
    adapter_param: str = "lora_path"


class AdapterCard(NamedTuple):
    """Describe an adapter (LoRA) that requests may name as their model. ``created`` is in seconds since 1970."""

    name: str
    directory: str
    created: int


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """Describe one HTTP request independently of the API that received it.

    ``rid`` is its public id. ``continues`` is True if the output's text continues the prompt's (a completion), False if
    it starts anew (a chat). ``reader`` makes a reader for one output; it is set for chats. ``namespace`` separates the
    cached prefixes of this request from the prefixes of other namespaces. ``group`` and ``session`` are hints for the
    engine (see ``messages.GenerateMsg``). ``more_bytes`` is the size, in bytes, of what the answer contains besides its
    outputs, and ``number_bytes`` the size of one number of its vectors; the server counts both before it accepts the request. A group has ``group_size`` outputs; 0 stands for the number of outputs of
    this request. If ``group`` is empty, the outputs of one prompt form a group.
    """

    rid: str
    prompts: tuple[Prompt, ...]
    continues: bool = True
    namespace: str = ""
    priority: int = 0
    reader: Callable[[], ChatReader] | None = None
    group: str = ""
    group_size: int = 0
    session: str = ""
    more_bytes: int = 0
    number_bytes: int = JSON_NUMBER_BYTES

    @property
    def num_outputs(self) -> int:
        """Return the number of sequences that are generated, over all prompts."""
        return sum(prompt.params.n for prompt in self.prompts)


class Acceptance(NamedTuple):
    """Count the drafts of one request or of several requests: ``accepted`` of ``drafted`` draft tokens were accepted.
    ``steps`` is the number of verify steps, counted once for each request with drafts. ``accepted`` does not count the
    one token that every step produces anyway."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def length(self) -> float:
        """Return the average number of tokens that a request got from a step with drafts; 1 before the first step."""
        return 1 + self.accepted / max(self.steps, 1)

    @property
    def rate(self) -> float:
        """Return the share of the drafts that was accepted."""
        return self.accepted / max(self.drafted, 1)


@dataclass(slots=True, eq=False)
class Choice:
    """Hold one output, which grows with each step.

    ``text`` and ``token_ids`` are everything generated so far. A stop token that ended the output is in ``token_ids``
    and not in ``text``. A stop string is cut off ``text``, together with everything after it, unless the request sets
    ``include_stop`` (``keeps_stop``). ``logprobs`` has an entry per token if the request requires log-probabilities.
    ``parts`` are the parts that the reader found in the text of a chat, ``calls`` is the number of tool calls among
    them, and ``reasoning_tokens`` the number of tokens before the answer if the chat has reasoning. ``pooled`` is the vector made of the prompt if the request's params have ``pooling``; it is set when the
    choice has finished. ``cached_tokens`` are the prompt tokens found in the prefix cache; if the model has several cache
    groups, ``cached_groups`` are those that each group alone had.
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
    acceptance: Acceptance = field(default_factory=Acceptance)
    parts: list[ChatDelta] = field(default_factory=list)
    calls: int = 0
    keeps_stop: bool = False
    reasoning_tokens: int = 0
    pooled: FloatArray | None = None
    cached_groups: tuple[int, ...] = ()

    @property
    def visible_logprobs(self) -> list[TokenLogprob]:
        """Return ``logprobs`` without the entry of a stop token that is not in the text. The choice must have
        finished."""
        assert self.finish is not None
        return self.logprobs[:-1] if isinstance(self.finish.matched, int) and not self.keeps_stop else self.logprobs


class Delta(NamedTuple):
    """Describe what one step has added to a choice. ``logprobs`` has no entry for a stop token that is not in the text.
    ``finish`` is set in the last delta of the choice."""

    choice: Choice
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    finish: FinishReason | None
    parts: Sequence[ChatDelta] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Count the tokens of a request. Each prompt counts once, regardless of the number of its outputs. ``cached`` are
    the prompt tokens found in the prefix cache. ``acceptance`` covers all outputs. ``reasoning`` are the tokens of
    ``completion`` before the answer of a chat, if the chat separates its reasoning. ``cached_groups`` is the sum of
    ``Choice.cached_groups`` over the prompts."""

    prompt: int
    completion: int
    cached: int
    acceptance: Acceptance
    reasoning: int = 0
    cached_groups: tuple[int, ...] = ()


class Generation(Protocol):
    """Give access to all outputs of one request. Iterate over it for the deltas of each engine step, or ``wait`` for
    the end.

    The caller must leave it, by ``close`` or by the end of a ``with`` block. Leaving it early aborts the outputs that
    are still being generated.
    """

    rid: str

    @property
    def choices(self) -> Sequence[Choice]:
        """Return the outputs, ordered by prompt."""
        ...

    @property
    def usage(self) -> Usage:
        """Return the token counts so far."""
        ...

    @property
    def elapsed(self) -> float:
        """Return the seconds since the request arrived."""
        ...

    def __enter__(self) -> Generation: ...

    def __exit__(self, *_: object) -> None: ...

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> list[Delta]:
        """Return the deltas of the engine's steps since the last call. Raises the error that ended the request, if it
        failed."""
        ...

    async def wait(self) -> None:
        """Wait until every choice has finished. Raises as ``__anext__``."""
        ...

    def close(self) -> None:
        """Abort the outputs that are still being generated. Further calls have no effect."""
        ...


class ChatPlan(Protocol):
    """Describe how the outputs of one chat are constrained and read. The API builds its ``ApiRequest`` with this
    ``params`` and this ``reader``."""

    @property
    def params(self) -> SamplingParams:
        """Return the sampling parameters, including the constraint that the tools need."""
        ...

    @property
    def tools(self) -> ToolRequest | None:
        """Return the tools that the model may call, or None."""
        ...

    def reader(self) -> ChatReader:
        """Return a new reader for one output."""
        ...


class ApiHost(ABC):
    """Give the handlers of an API access to the server, with the permissions and limits of the tenant that sent the
    request."""

    config: Config
    tokenizer: Tokenizer
    version: str
    model_name: str
    created: int
    """Hold the start time of the server, in seconds since the epoch."""
    context_len: int
    vocab_size: int
    embedding: Mapping[str, Any] | None
    """Describe the model's embeddings for ``dovetail.api.embeddings.pooling_kind``; None if the model offers none."""
    sampling_defaults: Mapping[str, Any]
    """Hold the values of sampling parameters that a request does not set, as the model's authors recommend them
    (``model.generation_config``); for ``dovetail.api.requests.sampling_params``. The output length is not among them:
    ``submit`` sets it."""
    owner: str = ""
    """Name the tenant that sent the request; empty if the server has no tenants. An API must show what it stores
    between requests to the same owner only."""

    @property
    @abstractmethod
    def max_body(self) -> int:
        """Return the largest size of a request body, in bytes; for ``dovetail.api.body.parse``."""

    @abstractmethod
    def submit(self, request: ApiRequest) -> Generation:
        """Send a request to the engine and return its outputs, without waiting for them. A request of a session has a
        single output. Outputs whose ``max_new_tokens`` is None have the length that the model recommends, if any. Raises ``DrainingError``, ``EngineDeadError`` or ``RequestError``, and for tenants
        ``RateLimitError``.
        """

    async def submit_in_parts(self, request: ApiRequest) -> Generation:
        """Do as ``submit``, but let other requests go on while a request with thousands of prompts is prepared."""
        return self.submit(request)

    @abstractmethod
    def check_model(self, name: str | None) -> None:
        """Raise ``UnknownModelError`` if ``name`` is neither the model that this server serves nor one of its adapters. None
        and "" stand for the served model. SGLang's ``model:adapter`` names an adapter, too. If it is an adapter, ``submit`` uses it for this HTTP request, and ``model_name`` is
        its name."""

    def check_adapter(self, name: str) -> None:
        """Raise ``UnknownModelError`` if the sender may not use an adapter of this name, or if there is none."""
        self.check_model(name)

    def adapters(self) -> Sequence[AdapterCard]:
        """Return the adapters that the sender may use."""
        return ()

    @abstractmethod
    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``. Long texts are encoded on a thread and do not delay other requests. Raises
        ``ContextLengthError``."""

    @abstractmethod
    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any],
        add_generation_prompt: bool = True,
        opening: str = "",
    ) -> str:
        """Return the prompt of a conversation, up to the beginning of the assistant's turn, or, without
        ``add_generation_prompt``, up to the end of the last message; then ``opening``, with which that turn begins. The
        caller encodes it without special tokens. Texts of the conversation that spell special tokens stay text: the
        prompt is then a ``dovetail.tokenizer.MarkedPrompt``, which must be encoded as it is.
        ``messages`` have the form that ``dovetail.chat.requests.plain_message`` returns; ``extra`` are arguments of the
        chat template. Raises ``RequestError``.
        """

    @abstractmethod
    def plan_chat(
        self, params: SamplingParams, prompt: str, tools: ToolRequest | None, separate_reasoning: bool = True
    ) -> ChatPlan:
        """Return how the outputs for this prompt are constrained and read. If ``separate_reasoning`` is False,
        reasoning stays in the content. Raises ``RequestError`` if ``tools`` cannot be parsed or enforced."""

    @abstractmethod
    def output_limit(self, ids: Sequence[int], default: int) -> int:
        """Return the output length, in tokens, for a request that sets none: ``default``, or the rest of the context
        after the prompt ``ids`` if that is less, and at least 1."""

    @abstractmethod
    def abort(self, rid: str) -> bool:
        """End the request with this public id; its client gets finish reason ``abort``. Return False if there is no
        such request."""


Handler = Callable[[ApiHost, "Request"], Awaitable["Response"]]
"""Answer one HTTP request. ``Api.error`` formats the exceptions that a handler raises."""


class Route(NamedTuple):
    """Describe one route of an API.

    The handler's docstring is the summary of the route in /docs. ``body`` is the schema of its request body, ``query``
    the schema of its query string. ``answers`` are the media types of its responses, including streamed responses.
    """

    methods: Sequence[str]
    path: str
    handler: Handler
    body: type[BaseModel] | None = None
    query: type[BaseModel] | None = None
    answers: Sequence[str] = ("application/json",)


@dataclass(frozen=True, slots=True)
class ApiProblem:
    """Describe why a request was not answered: the HTTP status, a message for the reader, a stable ``code``, the
    parameter at fault (``param``), and the number of seconds after which the client may send it again
    (``retry_after``).
    """

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: float | None = None


class Api(ABC):
    """Serve one HTTP protocol.

    The server builds one instance. Its handlers run concurrently in one event loop and must not block it.

    ``claims`` are path prefixes. Errors at a path below one of them have this API's format, even if no route exists
    there. If the prefixes of several APIs match, the API with the longest one formats the error.
    """

    claims: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: BaseModel) -> None:
        """Store what the API needs of ``config``, which is this API's own config section."""

    @abstractmethod
    def routes(self) -> Sequence[Route]:
        """Return the routes that this API answers."""

    def error(self, problem: ApiProblem) -> object:
        """Return the JSON body of an error response."""
        return {"error": {"message": problem.message}}

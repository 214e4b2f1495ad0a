"""Collect the outputs of one HTTP request and turn their tokens into text, for every API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.errors import DovetailError, EngineError, RequestError, TimeLimitError
from dovetail.generation.collecting import collect
from dovetail.interfaces.api import Acceptance, ApiRequest, Choice, Delta, Usage
from dovetail.server.answers import bytes_per_token
from dovetail.server.request_log import log_request
from dovetail.tokenizer import IncrementalDetokenizer
from dovetail.types import FinishKind

if TYPE_CHECKING:
    from dovetail.interfaces.api import ChatDelta, ChatReader
    from dovetail.messages import GenerateMsg, TokenOutput
    from dovetail.server.engines import Stream
    from dovetail.server.metrics import RequestMetrics
    from dovetail.tokenizer import Tokenizer


class GrowingChoice(Choice):
    """Extend a ``Choice`` with the token outputs of its request."""

    def __init__(
        self, tokenizer: Tokenizer, index: int, msg: GenerateMsg, continues: bool, reader: ChatReader | None = None
    ) -> None:
        super().__init__(index, msg.input_ids, keeps_stop=msg.params.include_stop)
        self.reader = reader
        makes_text = msg.params.pooling is None
        self._detokenizer = IncrementalDetokenizer.for_params(tokenizer, msg.params, continues) if makes_text else None
        self._answering = self._reasons = False
        self._before_answer = 0

    def add(self, output: TokenOutput) -> Delta:
        """Add an output and return what it added. Raises ``EngineError`` if the request failed."""
        if output.finish is not None and output.finish.kind is FinishKind.ERROR:
            raise EngineError(f"the request failed: {output.finish.message}")
        text, shown, parts = collect(self, output, self._detokenizer, self.reader)
        if self.reader is not None:
            self.parts += parts
            self.calls = self.reader.calls
            self._count_reasoning(output, parts)
        return Delta(self, text, output.token_ids, (output.logprobs or [])[:shown], self.finish, parts)

    def _count_reasoning(self, output: TokenOutput, parts: Sequence[ChatDelta]) -> None:
        """Count the tokens of ``output`` as reasoning if the answer has not begun before them. An output without
        reasoning has none."""
        if self._answering:
            return
        self._reasons = self._reasons or any(part.reasoning for part in parts)
        self._answering = any(part.content or part.calls for part in parts)
        if not self._answering or any(part.reasoning for part in parts):
            self._before_answer += len(output.token_ids)
        self.reasoning_tokens = self._before_answer if self._reasons else 0


def growing_choices(
    parsed: ApiRequest, msgs: Sequence[GenerateMsg], tokenizer: Tokenizer, first: int
) -> list[GrowingChoice]:
    """Return a choice for each of ``msgs``. ``first`` is the index of the first choice in the request."""
    return [
        GrowingChoice(tokenizer, i, msg, parsed.continues, parsed.reader and parsed.reader())
        for i, msg in enumerate(msgs, first)
    ]


@dataclass(frozen=True, slots=True)
class RequestTerms:
    """Hold the terms under which a request runs. ``name`` is its id in the engine if that differs from its public id;
    ``max_seconds`` limits its duration. ``tenant`` names its tenant. ``on_close`` is called once, when the request has
    ended."""

    name: str | None = None
    max_seconds: float | None = None
    tenant: str = ""
    on_close: Callable[[RequestOutputs], None] | None = None


class RequestOutputs:
    """Collect the outputs of one request. Implements ``interfaces.api.Generation``. ``error`` is the error it ended with, if any;
    ``on_closed`` is called when they are closed."""

    def __init__(
        self,
        parsed: ApiRequest,
        msgs: Sequence[GenerateMsg],
        choices: list[GrowingChoice],
        stream: Stream,
        metrics: RequestMetrics,
        terms: RequestTerms,
        logs: bool = False,
    ) -> None:
        """There is one of ``choices`` for each of ``msgs``. ``logs`` writes a line to the log when the request has ended."""
        self._logs = logs
        self.rid = parsed.rid
        self.error: DovetailError | None = None
        self.choices = choices
        self._first = _first_of_each_prompt(parsed)
        self.on_closed: Callable[[], None] | None = None
        self._by_rid = {msg.rid: choice for msg, choice in zip(msgs, self.choices, strict=True)}
        self._stream = stream
        self.metrics = metrics
        self._terms = terms
        self._closed = False
        self._final: Usage | None = None  # the usage once closed, because there may be thousands of choices to count
        self._late = False
        self.most_bytes: float | None = None
        """The largest size of the answer, in bytes; ``AnswerLimit`` has estimated it, but not outputs of any length."""
        self._bytes = 0
        params = {id(msg.params): msg.params for msg in msgs}.values()  # prompts share theirs in most requests
        self._per_token = max((bytes_per_token(one.logprobs, one) for one in params), default=0)
        self._counts = any(one.logprobs is not None for one in params)
        self._timer: asyncio.TimerHandle | None = None
        if terms.max_seconds is not None:
            self._timer = asyncio.get_running_loop().call_later(terms.max_seconds, self._end_late)

    def __enter__(self) -> RequestOutputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __aiter__(self) -> RequestOutputs:
        return self

    async def __anext__(self) -> list[Delta]:
        """Return the deltas of the engine's steps since the last call. Raises the error that ended a request."""
        try:
            batch = [output for output in await self._next() if self._by_rid[output.rid].finish is None]
            self.metrics.observe(batch)
            if self._counts:
                self._check_size(batch)
            deltas = [self._by_rid[output.rid].add(output) for output in batch]
        except DovetailError as error:
            self.error = error
            raise
        for output, delta in zip(batch, deltas, strict=True):
            if delta.finish is not None and output.finish is None:  # the reader has found a stop string
                self._stream.end(output.rid)
                self.metrics.finish(output.rid, delta.finish.kind)
        return deltas

    def _check_size(self, batch: Sequence[TokenOutput]) -> None:
        """Raise ``RequestError`` if the log-probabilities of generated tokens have become more than an answer may hold."""
        self._bytes += self._per_token * sum(len(output.token_ids) for output in batch)
        if self.most_bytes is not None and self._bytes > self.most_bytes:
            raise RequestError(
                f"the answer has more than {self.most_bytes / 2**20:g} MiB (server.limits.answer_mib); lower max_tokens, n or "
                "the number of top log-probabilities",
                code="answer_too_large",
            )

    async def wait(self) -> None:
        """Wait until every choice has finished."""
        async for _ in self:
            pass

    def close(self) -> None:
        """Abort the outputs that are still running."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close()
        self.metrics.close(finished=not self._stream.open)
        if self._terms.on_close is not None:
            self._terms.on_close(self)
        if self.on_closed is not None:
            self.on_closed()
        if self._logs:
            log_request(self._terms.tenant, self, self.metrics)

    async def _next(self) -> list[TokenOutput]:
        try:
            return await self._stream.__anext__()
        except StopAsyncIteration:
            if self._late:
                raise TimeLimitError(
                    f"the request ran longer than {self._terms.max_seconds:g} s (max_seconds); ask for fewer tokens"
                ) from None
            raise

    def _end_late(self) -> None:
        """Abort the outputs that are still running, even if the client does not read them."""
        if self._stream.open:
            self._late = True
            self._stream.close()

    @property
    def by_rid(self) -> Sequence[tuple[str, GrowingChoice]]:
        """Return the engine's id of each choice, and the choice."""
        return tuple(self._by_rid.items())

    @property
    def finished(self) -> bool:
        """Return True if no output is running."""
        return not self._stream.open

    @property
    def unread(self) -> int:
        """Return the number of tokens that were generated and that no choice holds yet."""
        return self._stream.unread

    @property
    def elapsed(self) -> float:
        """Return the seconds since the request arrived."""
        return self.metrics.elapsed

    @property
    def usage(self) -> Usage:
        """Return the token counts so far."""
        if self._final is not None:
            return self._final
        usage = self._count()
        if self._closed:
            self._final = usage
        return usage

    def _count(self) -> Usage:
        firsts = [self.choices[i] for i in self._first]
        return Usage(
            sum(len(choice.prompt_ids) for choice in firsts),
            sum(len(choice.token_ids) for choice in self.choices),
            sum(choice.cached_tokens for choice in firsts),
            Acceptance(*map(sum, zip(*(choice.acceptance for choice in self.choices), strict=True))),
            sum(choice.reasoning_tokens for choice in self.choices),
            tuple(map(sum, zip(*(choice.cached_groups for choice in firsts if choice.cached_groups), strict=True))),
        )


def _first_of_each_prompt(parsed: ApiRequest) -> list[int]:
    firsts: list[int] = []
    at = 0
    for prompt in parsed.prompts:
        firsts.append(at)
        at += prompt.params.n
    return firsts

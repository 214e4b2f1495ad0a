"""Run an engine in one thread that accepts requests from many threads."""

from __future__ import annotations

import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dovetail.errors import EngineDeadError, EngineError
from dovetail.llm.runs import Output, Run
from dovetail.messages import AbortAllMsg, CommandReply, FlushCacheMsg, GenerateMsg, RequestFailed, TokenOutput

if TYPE_CHECKING:
    from dovetail.loop import Loop
    from dovetail.tokenizer import Tokenizer

T = TypeVar("T")

CLOSED = "the backend was closed"
_IDLE_CHECK_SECONDS = 1.0


class SubmittedCall:
    """Hold one sequence that the engine thread computes. The engine thread writes, and one other thread reads."""

    def __init__(self, msg: GenerateMsg, tokenizer: Tokenizer | None) -> None:
        self.run = Run(msg, tokenizer)
        self.pieces: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None marks the end

    def output(self, on_text: Callable[[str], None] | None = None) -> Output:
        """Wait for the output; ``on_text`` is called with its text as it grows. Raises the error that ended the
        call."""
        while (piece := self.pieces.get()) is not None:
            if on_text is not None and piece:
                on_text(piece)
        if self.run.error is not None:
            raise self.run.error
        return self.run.output

    def end(self, error: Exception | None = None) -> None:
        """End the call, with ``error`` if it failed, and wake its reader."""
        self.run.error = error or self.run.error
        self.pieces.put(None)


class EngineThread:
    """Run the steps of a ``Loop`` in a separate thread, which alone uses the loop.

    Every call that ``submit`` accepted ends: with its output, with the engine's error, or, when this object is closed
    or fails, with ``EngineError``.
    """

    def __init__(self, loop: Loop, tokenizer: Tokenizer | None) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._inbox: queue.SimpleQueue[Sequence[SubmittedCall] | Callable[[], None] | None] = queue.SimpleQueue()
        self._backlog: deque[SubmittedCall] = deque()  # calls beyond the number that may wait in the engine
        self._calls: dict[str, SubmittedCall] = {}
        self._replies: dict[str, queue.SimpleQueue[CommandReply]] = {}
        self._lock = threading.Lock()
        self._refusal: Exception | None = None  # once set, nothing more is put into the inbox
        self._thread = threading.Thread(target=self._work, name="dovetail-engine", daemon=True)
        self._thread.start()

    def submit(self, msgs: Sequence[GenerateMsg]) -> list[SubmittedCall]:
        """Send requests together; wait for them with ``SubmittedCall.output``. Raises ``EngineError`` after
        ``close``."""
        calls = [SubmittedCall(msg, self._tokenizer) for msg in msgs]
        self._put(calls)
        return calls

    def query(self, function: Callable[[Loop], T]) -> T:
        """Call ``function`` with the loop between two steps, in the engine thread, and return its result."""
        answer: queue.SimpleQueue[tuple[bool, object]] = queue.SimpleQueue()

        def run_function() -> None:
            try:
                answer.put((True, function(self._loop)))
            except Exception as error:
                answer.put((False, error))

        self._put(run_function)
        good, value = answer.get()
        if isinstance(value, Exception) and not good:
            raise value
        return value  # type: ignore[return-value]

    def flush_cache(self) -> CommandReply:
        """Remove every cached prefix; refused while requests are running."""
        call_id, answer = secrets.token_hex(8), queue.SimpleQueue[CommandReply]()

        def send(loop: Loop) -> None:
            self._replies[call_id] = answer
            loop.handle(FlushCacheMsg(call_id))

        self.query(send)
        return answer.get()

    def close(self) -> None:
        """End every call with an error, and end the thread. May be called twice, and from any thread except the
        engine thread."""
        with self._lock:
            if self._refusal is None:
                self._refusal = EngineError(f"{CLOSED}; make a new one")
                self._inbox.put(None)
        self._thread.join()

    def request_stop(self) -> None:
        """Request the end of the thread without waiting or taking a lock. It may be called during garbage
        collection."""
        self._inbox.put(None)

    def _put(self, item: Sequence[SubmittedCall] | Callable[[], None]) -> None:
        with self._lock:
            if self._refusal is not None:
                raise _copied(self._refusal)
            self._inbox.put(item)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while self._take():
                self._admit()
                if self._loop.has_work:
                    self._step()
        except Exception as error:
            self._stop(error)
        else:
            self._stop(EngineError(CLOSED))
            self._empty()

    def _take(self) -> bool:
        """Read the inbox, waiting if there is nothing else to do; return False after a request to stop."""
        while True:
            idle = not self._loop.has_work and not self._backlog
            if idle and self._inbox.empty() and self._loop.idle():
                continue
            try:
                item = self._inbox.get(block=idle, timeout=_IDLE_CHECK_SECONDS)
            except queue.Empty:
                return True
            if item is None:
                return False
            if callable(item):
                item()
            else:
                self._backlog.extend(item)

    def _admit(self) -> None:
        scheduler = self._loop.scheduler
        while self._backlog and len(scheduler.waiting) < scheduler.limits.max_waiting:
            call = self._backlog.popleft()
            self._calls[call.run.msg.rid] = call
            self._loop.handle(call.run.msg)

    def _step(self) -> None:
        for answer in self._loop.step():
            if isinstance(answer, TokenOutput | RequestFailed):
                self._answer(answer)
            elif isinstance(answer, CommandReply):
                self._replies.pop(answer.call_id).put(answer)

    def _answer(self, answer: TokenOutput | RequestFailed) -> None:
        call = self._calls.get(answer.rid)
        if call is not None:
            call.run.take(answer)
            call.pieces.put(call.run.take_fresh())
            if call.run.error is not None or call.run.output.finish is not None:
                del self._calls[answer.rid]
                call.end()

    def _stop(self, error: Exception) -> None:
        """Accept no further calls, and end the accepted calls with ``error``."""
        with self._lock:
            self._refusal = self._refusal or error
        while not self._inbox.empty():
            item = self._inbox.get()
            if callable(item):
                item()
            else:
                self._backlog.extend(item or ())
        for call in (*self._calls.values(), *self._backlog):
            call.end(_copied(error))
        for call_id, reply in self._replies.items():
            reply.put(CommandReply(call_id, False, str(error)))
        self._calls.clear()
        self._backlog.clear()
        self._replies.clear()

    def _empty(self) -> None:
        """Abort the requests that are left in the engine, because its owner will use it again."""
        if self._loop.dead is None:
            self._loop.handle(AbortAllMsg(CLOSED))
            while self._loop.has_work:
                self._loop.step()


def _copied(error: Exception) -> EngineError:
    """Return a copy of ``error`` for one more caller: an exception that several threads raise would collect all
    their tracebacks."""
    if isinstance(error, EngineError):
        return type(error)(*error.args)
    copy = EngineDeadError(f"the engine has failed: {type(error).__name__}: {error}; make a new one")
    copy.__cause__ = error
    return copy

"""Offline use: the engine in this process, driven by whoever calls ``generate``."""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.chat.calls import whole_calls
from dovetail.chat.parsing import OutputParsers, load_parsers
from dovetail.chat.requests import calls_wanted, plain_message, read_tools, shown_tools
from dovetail.config import dump
from dovetail.errors import ConfigError, EngineError, RequestError
from dovetail.messages import AbortMsg, GenerateMsg, RequestFailed, TokenOutput
from dovetail.ops.random import derive_seed
from dovetail.plugins.candidates import call_hook
from dovetail.plugins.machine import Machine
from dovetail.plugins.resolver import resolve
from dovetail.plugins.setup import setup
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer, load_tokenizer
from dovetail.types import Acceptance, FinishKind, FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from dovetail.chat.reading import ChatDelta, OutputReader
    from dovetail.config import Config

Prompt = str | Sequence[int]


@dataclass(slots=True)
class Output:
    """One generated sequence. ``text`` grows, and the rest is final once ``finish`` is set."""

    prompt_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    drafted: int = 0
    accepted: int = 0
    verify_steps: int = 0
    grammar_backend: str | None = None

    @property
    def acceptance(self) -> Acceptance:
        """What came of the drafts, where there were any."""
        return Acceptance(self.drafted, self.accepted, self.verify_steps)


@dataclass(slots=True)
class ChatOutput(Output):
    """An answer of a chat. ``text`` is all that the model wrote; ``content``, ``reasoning_content`` and ``tool_calls`` (in
    OpenAI's form) are what it turned out to be."""

    content: str = ""
    reasoning_content: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, for the next turn of the conversation."""
        calls = {"tool_calls": self.tool_calls} if self.tool_calls else {}
        return {"role": "assistant", "content": self.content, **calls}


class LLM:
    """A model, ready to generate. Has a ``Loop``; is not one.

    ``LLM("tiny", attention="torch_native", scheduler={"chunk_size": 256})``: the first argument is ``model.path`` or a
    whole ``Config``; keywords are sections of the config tree, as they would stand in a file; ``config_file`` is such a
    file. Raises ``ConfigError`` and ``PluginError`` as the server would. Not thread-safe.

    Ctrl-C takes effect between two steps: the requests of the call it interrupts are aborted, the object can be used on.
    A second Ctrl-C does not wait; where it leaves the books in doubt, every later call raises ``EngineDeadError``.
    """

    def __init__(
        self, model: str | Config | None = None, /, *, config_file: str | Path | None = None, **sections: Any
    ) -> None:
        from dovetail.loop import Loop

        if isinstance(model, str):
            sections["model"] = _with_path(sections.get("model", {}), model)
        elif model is not None:
            sections = {**dump(model), **sections}
        files = [Path(config_file)] if config_file else []
        config, registry = setup(files, env=os.environ, arguments=sections)
        self._config, self._registry = config, registry
        self.resolved = resolve(config, registry, Machine.detect(config.device))
        has_tokenizer = config.model.tokenizer or (self.resolved.model_dir / "tokenizer.json").is_file()
        self.tokenizer = load_tokenizer(config) if has_tokenizer else None
        self.loop = Loop(self.resolved, self.tokenizer)
        call_hook(self.resolved.hooks, "on_engine_start", info=self.loop.info)
        self._ids = itertools.count()
        self._runs: dict[str, _Run] = {}

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Generate for each prompt (text, or token ids); with ``n > 1`` the outputs of a prompt follow one another.

        ``params`` is one for all or one each. Raises ``RequestError`` if any request is refused, before or while the
        others run (they are aborted), and ``EngineError`` if its step failed.
        """
        many = _prompts(prompts)
        runs = [run for prompt, p in zip(many, _each(params, len(many)), strict=True) for run in self._make(prompt, p)]
        with _Held() as held:
            for _ in self._drive(runs, held):
                pass
        return [run.output for run in runs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Generate one output and yield its text as it becomes final. Closing the iterator aborts the request. Streams
        may be read in turns, and ``generate`` called between: all of them share the engine's steps."""
        params = _each(params, 1)[0]
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream has one output", param="n")
        self._need_tokenizer()
        return self._stream(self._make(prompt, params))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        separate_reasoning: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> ChatOutput:
        """Answer a conversation, written out by the model's chat template: constrained and read as /v1/chat/completions
        does it, with fields of the same names. Raises ``RequestError``, as ``generate`` does."""
        params = _each(params, 1)[0]
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a chat has one output", param="n")
        specs, choice = read_tools(tools, tool_choice)
        wanted = calls_wanted(specs, choice, parallel_tool_calls)
        shown = shown_tools(specs) if wanted is not None else []
        prompt = self._chat_prompt(messages, shown, chat_template_kwargs or {})
        plan = self._parsers.plan(params, prompt, wanted, separate_reasoning)
        reader = plan.reader()
        (run,) = self._make(self._encoded(prompt), plan.params)
        run.output, run.reader = ChatOutput(run.output.prompt_ids), reader
        with _Held() as held:
            for _ in self._drive([run], held):
                pass
        return _chat_output(run)

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], params: SamplingParams | None = None) -> Iterator[str]:
        """Answer a conversation, yielding the model's text as it becomes final, marks of reasoning included."""
        return self.stream(self._encoded(self._chat_prompt(messages, [], {})), params)

    def close(self) -> None:
        """Free the engine's workers; the object must not be used again."""
        if self.loop.dead is None:
            call_hook(self.resolved.hooks, "on_engine_stop")
        self.loop.close()

    @cached_property
    def _parsers(self) -> OutputParsers:
        return load_parsers(self.loop.info, self._config, self._need_tokenizer(), self._registry)

    def _chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> str:
        plain = [plain_message(message, i) for i, message in enumerate(messages)]
        return self._need_tokenizer().apply_chat_template(plain, tools or None, True, extra)

    def _encoded(self, prompt: str) -> list[int]:
        return self._need_tokenizer().encode(prompt, add_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model was loaded without a tokenizer; give token ids, not text")
        return self.tokenizer

    def _make(self, prompt: Prompt, params: SamplingParams) -> list[_Run]:
        """One run for each of the prompt's outputs. Nothing is sent to the engine yet."""
        ids = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        msgs = [GenerateMsg(str(next(self._ids)), ids, params, derive_seed(seed, i)) for i in range(params.n)]
        return [_Run(msg, self.tokenizer) for msg in msgs]

    def _stream(self, runs: list[_Run]) -> Iterator[str]:
        """Drive ``runs``; what the reader does between two pieces of text may be interrupted at any time."""
        held = _Held()
        pieces = self._drive(runs, held)
        try:
            while True:
                with held:
                    text = next(pieces, None)
                if text is None:
                    return
                yield text
        finally:
            with held:
                pieces.close()

    def _drive(self, runs: list[_Run], held: _Held) -> Generator[str, None, None]:
        """Step until all runs have ended, yielding the text of the first as it comes. Raises what ended one of them."""
        pending, num_open, ended = deque(runs), len(runs), list[_Run]()
        try:
            while num_open:
                if not ended:
                    self._submit(pending, ended)
                    self._step()
                    held.release()
                for run in ended:
                    if run.error is not None:
                        raise run.error
                num_open -= len(ended)
                ended.clear()
                if text := runs[0].take_fresh():
                    yield text
        finally:
            self._abandon(runs)

    def _submit(self, pending: deque[_Run], ended: list[_Run]) -> None:
        """Send runs to the engine, as many as may wait there."""
        scheduler = self.loop.scheduler
        while pending and len(scheduler.waiting) < scheduler.limits.max_waiting:
            run = pending.popleft()
            self._runs[run.msg.rid] = run
            run.ended = ended
            self.loop.handle(run.msg)

    def _step(self) -> None:
        """One step of the engine; its answers go to their runs, whoever called."""
        answers = self.loop.step()
        if not answers and not self.loop.has_work:
            raise EngineError("an interrupt has taken the last step's answers with it; call again")
        for answer in answers:
            if isinstance(answer, TokenOutput | RequestFailed) and (run := self._runs.get(answer.rid)) is not None:
                run.take(answer)
                if run.error is not None or run.output.finish is not None:
                    del self._runs[answer.rid]
                    if run.stopped:
                        self.loop.handle(AbortMsg(answer.rid))
                    run.ended.append(run)

    def _abandon(self, runs: list[_Run]) -> None:
        """Abort those of ``runs`` that have not ended."""
        unfinished = [rid for run in runs if self._runs.pop(rid := run.msg.rid, None) is not None]
        if self.loop.dead is not None:
            return
        for rid in unfinished:
            self.loop.handle(AbortMsg(rid))
        aborted = unfinished or any(run.stopped for run in runs)
        while aborted and not self._runs and self.loop.has_work:
            self.loop.step()


class _Run:
    """One sequence being generated. ``ended`` is where it is put once it has its ``output.finish`` or its ``error``;
    ``stopped`` if its ``reader`` has ended it and not the engine. ``parts`` are what the reader has found."""

    def __init__(self, msg: GenerateMsg, tokenizer: Tokenizer | None) -> None:
        self.msg = msg
        self.output = Output(list(msg.input_ids))
        self.error: Exception | None = None
        self.ended: list[_Run] = []
        self.reader: OutputReader | None = None
        self.parts: list[ChatDelta] = []
        self.stopped = False
        self._fresh: list[str] = []
        self._detokenizer = tokenizer and IncrementalDetokenizer.for_params(tokenizer, msg.params)

    def take(self, answer: TokenOutput | RequestFailed) -> None:
        if isinstance(answer, RequestFailed):
            self.error = answer.error()
            return
        output = self.output
        output.token_ids += answer.token_ids
        output.finish, output.cached_tokens = answer.finish, answer.cached_tokens
        output.drafted, output.accepted, output.verify_steps = answer.drafted, answer.accepted, answer.verify_steps
        output.grammar_backend = answer.grammar_backend or output.grammar_backend
        output.logprobs += answer.logprobs or []
        output.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
        if answer.finish is not None and answer.finish.kind is FinishKind.ERROR:
            self.error = EngineError(answer.finish.message or "the request failed")
        if self._detokenizer is not None:
            text, _ = self._detokenizer.take(answer)
            output.text += text
            self._fresh.append(text)
            if self.reader is not None:
                self._read(self.reader, text, answer.finish)

    def _read(self, reader: OutputReader, text: str, finish: FinishReason | None) -> None:
        parts, self.output.finish = reader.take(text, finish, len(self.output.token_ids))
        self.stopped = finish is None and self.output.finish is not None
        self.parts += parts

    def take_fresh(self) -> str:
        text = "".join(self._fresh)
        self._fresh.clear()
        return text


class _Held:
    """Holds a first Ctrl-C back while it is entered, until ``release`` or the end; a second one is not held back. Python
    calls signal handlers in the main thread only: in others it does nothing."""

    def __enter__(self) -> _Held:
        self._handler = signal.getsignal(signal.SIGINT)
        self._arrived = False
        self._on = callable(self._handler) and threading.current_thread() is threading.main_thread()
        if self._on:
            signal.signal(signal.SIGINT, self._hold)
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            signal.signal(signal.SIGINT, self._handler)
        self._deliver()

    def release(self) -> None:
        """Let what was held back take effect, as KeyboardInterrupt where nothing else was asked for."""
        if self._arrived:
            signal.signal(signal.SIGINT, self._hold)
            self._deliver()

    def _hold(self, number: int, frame: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        self._arrived = True

    def _deliver(self) -> None:
        if self._arrived:
            self._arrived = False
            assert callable(self._handler)
            self._handler(signal.SIGINT, None)


def _chat_output(run: _Run) -> ChatOutput:
    output = run.output
    assert isinstance(output, ChatOutput)
    output.content = "".join(part.content for part in run.parts)
    output.reasoning_content = "".join(part.reasoning for part in run.parts)
    output.tool_calls = whole_calls([call for part in run.parts for call in part.calls])
    return output


def _with_path(section: object, path: str) -> dict[str, Any]:
    """The ``model`` section with the path that was given by position."""
    if not isinstance(section, dict) or "path" in section:
        raise ConfigError(f"the model is given twice, as {path!r} and as model={section!r}; keep one")
    return {**section, "path": path}


def _prompts(prompts: object) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; allowed: text, a list of token ids, or a list of those",
            param="prompts",
        )
    single = len(prompts) > 0 and isinstance(prompts[0], Integral)
    return [list(prompts)] if single else list(prompts)


def _token_ids(prompt: object) -> list[int]:
    if isinstance(prompt, list) and set(map(type, prompt)) <= {int}:  # the usual case, many times faster than the rest
        return prompt.copy()
    if not isinstance(prompt, Sequence) or not all(isinstance(t, Integral) for t in prompt):
        raise RequestError(
            f"a prompt is {prompt!r:.80}; allowed: text, or a list of token ids (integers)", param="prompts"
        )
    return [int(token) for token in prompt]


def _each(params: object, count: int) -> list[SamplingParams]:
    """Sampling params of ``count`` prompts."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise RequestError(f"params is {params!r:.80}; allowed: one SamplingParams, or a list of them", param="params")
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts; give one, or one each", param="params")
    return list(params)

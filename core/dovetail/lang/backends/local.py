"""Run programs on the engine in this process."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dovetail.api.meta import finish_json, logprobs_json
from dovetail.errors import EngineError, RequestError
from dovetail.generation.expansion import expand
from dovetail.lang.backends.base import (
    Backend,
    Features,
    Generated,
    OnText,
    ReuseHints,
    common_prefix_length,
    joined_scores,
)
from dovetail.lang.backends.params import CONSTRAINTS, sampling_params
from dovetail.lang.choices import Scored
from dovetail.lang.conversation import Conversation, Template
from dovetail.lang.ir import SamplingOptions
from dovetail.messages import EngineStats, GenerateMsg
from dovetail.sampling_params import SamplingParams

if TYPE_CHECKING:
    from dovetail.llm import LLM, Output

_llms_in_use: weakref.WeakSet[LLM] = weakref.WeakSet()
_PREFILL = SamplingParams(max_new_tokens=0, temperature=0.0)


class Runtime(Backend):
    """Run a model in this process: ``Runtime("tiny")``, ``Runtime(model_path="tiny", memory={...})``, or around an
    ``LLM``.

    Keywords are passed to ``LLM``. A thread of the runtime owns the engine: do not call the ``LLM`` until the runtime is
    closed. Threads may call the runtime at the same time; their requests share the engine's steps.
    """

    features = Features(scores=True, prefills=True, constraints=CONSTRAINTS)

    def __init__(self, model: str | LLM | None = None, /, *, model_path: str | None = None, **sections: Any) -> None:
        from dovetail.lang.backends.engine_thread import EngineThread
        from dovetail.llm import LLM

        if isinstance(model, LLM):
            if model_path is not None or sections:
                raise RequestError("an LLM already has a config; give only the LLM, or a model's path with settings")
            self.llm, self._owns = model, False
            if model in _llms_in_use:
                raise RequestError("this LLM belongs to another Runtime; use that one, or close it first")
        else:
            self.llm, self._owns = LLM(model or model_path, **sections), True
        self.tokenizer = self.llm.tokenizer
        self._ids = itertools.count()
        recommended = self.llm.resolved.sampling_defaults
        self._defaults = {name: value for name, value in recommended.items() if name != "max_new_tokens"}
        self._engine_thread = EngineThread(self.llm.loop, self.tokenizer)
        self._closed = False
        _llms_in_use.add(self.llm)
        _close_at_exit(self)

    @property
    def endpoint(self) -> Runtime:
        """Return this runtime, which is a backend itself."""
        return self

    def __repr__(self) -> str:
        return f"Runtime({self.llm.resolved.config.model.path!r})"

    def template(self) -> Template:
        """Return the model's own chat template."""
        tokenizer = self._text()
        return lambda messages, opened: tokenizer.apply_chat_template(messages, None, opened)

    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """See ``Backend.generate``; several outputs form a separate group."""
        self.check(conversation, sampling)
        params = sampling_params(sampling, self._defaults)
        ids = self._ids_of(conversation.text(self.template()), conversation.chat)
        if params.n > 1 and hints.group_size == 1:
            hints = replace(hints, group=f"n-{secrets.token_hex(8)}", group_size=params.n)
        rids = [self._next_id() for _ in range(params.n)]
        msgs = expand(ids, params, rids, group=hints.group, group_size=hints.group_size, session=hints.session)
        calls = self._engine_thread.submit(msgs)
        outputs = [call.output(None if i else on_text) for i, call in enumerate(calls)]
        return [Generated(output.text, self._meta(output, sampling)) for output in outputs]

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        """Compute the prompt once, then the choices together on top of it; see ``Backend.score``."""
        self.check(conversation, SamplingOptions())
        text = conversation.text(self.template())
        ids = self._ids_of(text, conversation.chat)
        (first,) = self._engine_thread.submit([self._msg(ids, _PREFILL, hints)])
        cached = first.output().cached_tokens
        longer = [self._ids_of(text + choice, conversation.chat) for choice in choices]
        start = min(common_prefix_length(ids, each) for each in longer)
        scored = self._scored(longer, max(start, 1), ReuseHints())
        if unconditional:
            scored = [replace(each, unconditional=self._unconditional_logprobs(each)) for each in scored]
        return scored, {"prompt_tokens": len(ids), "cached_tokens": cached}

    def prefill(self, text: str, chat: bool) -> None:
        """Compute ``text`` except its last token, which longer texts could tokenize differently."""
        if ids := self._ids_of(text, chat, may_be_empty=True)[:-1]:
            (call,) = self._engine_thread.submit([self._msg(ids, _PREFILL, ReuseHints())])
            call.output()

    def flush_cache(self) -> None:
        """Remove every cached prefix. Raises ``EngineError`` while requests are running."""
        reply = self._engine_thread.flush_cache()
        if not reply.ok:
            raise EngineError(f"the cache was not flushed: {reply.message}")

    def server_info(self) -> dict[str, Any]:
        """Return what /server_info reports about an engine."""
        return self._engine_thread.query(lambda loop: loop.info)

    def stats(self) -> EngineStats:
        """Return the engine's current statistics."""
        return self._engine_thread.query(lambda loop: loop.stats())

    def close(self) -> None:
        """End running calls; an engine that the runtime created is closed with it."""
        if not self._closed:
            self._closed = True
            self._engine_thread.close()
            _llms_in_use.discard(self.llm)
            if self._owns:
                self.llm.close()

    def shutdown(self) -> None:
        """Call ``close``. Programs written for SGLang use this name."""
        self.close()

    def _scored(self, ids: Sequence[list[int]], start: int, hints: ReuseHints) -> list[Scored]:
        """Score the tokens of each of ``ids`` from ``start`` on. ``start`` is at least 1, because a first token has
        no log-probability."""
        params = replace(_PREFILL, prompt_logprobs=0, prompt_logprobs_start=start)
        group = ReuseHints(f"select-{secrets.token_hex(8)}", len(ids)) if len(ids) > 1 else hints
        calls = self._engine_thread.submit([self._msg(each, params, group) for each in ids])
        found = [call.output().prompt_logprobs or [] for call in calls]
        return joined_scores((), [[(e.token_id, e.logprob or 0.0) for e in entries] for entries in found])

    def _unconditional_logprobs(self, scored: Scored) -> tuple[float | None, ...]:
        """Return the log-probabilities of a choice's tokens without a prompt."""
        bos = self._text().bos_token_id
        before = [] if bos is None else [bos]
        known = (
            self._scored([before + list(scored.tokens)], 1, ReuseHints())[0].logprobs
            if before or scored.tokens[1:]
            else ()
        )
        return known if before else (None, *known)

    def _meta(self, output: Output, sampling: SamplingOptions) -> dict[str, Any]:
        count = len(output.token_ids)
        meta: dict[str, Any] = {
            "finish_reason": finish_json(output.finish, count),
            "prompt_tokens": len(output.prompt_ids),
            "completion_tokens": count,
            "cached_tokens": output.cached_tokens,
        }
        if sampling.return_logprob:
            text = self._token_text if sampling.return_text_in_logprobs else _no_text
            top = bool(sampling.top_logprobs_num)
            meta |= logprobs_json(output.prompt_logprobs or [], "input", top, text)
            meta |= logprobs_json(output.logprobs, "output", top, text)
        return meta

    def _token_text(self, token: int) -> str:
        return self._text().bytes_of(token).decode("utf-8", "replace")

    def _msg(self, ids: list[int], params: SamplingParams, hints: ReuseHints) -> GenerateMsg:
        return GenerateMsg(
            self._next_id(), ids, params, 0, group=hints.group, group_size=hints.group_size, session=hints.session
        )

    def _next_id(self) -> str:
        return f"program-{next(self._ids)}"

    def _ids_of(self, text: str, chat: bool, may_be_empty: bool = False) -> list[int]:
        ids = self._text().encode(text, add_special_tokens=not chat)
        if not ids and not may_be_empty:
            raise RequestError("the prompt is empty; append text before the first gen(...)", param="prompt")
        return ids

    def _text(self) -> Any:
        if self.tokenizer is None:
            raise RequestError(
                "this model was loaded without a tokenizer, and programs need one; give a model with a tokenizer"
            )
        return self.tokenizer


def _no_text(token: int) -> None:
    return None


def _close_at_exit(runtime: Runtime) -> None:
    """End the engine thread at interpreter exit, or when the runtime is collected.

    The thread must not run kernels while the interpreter shuts down, and it must not continue when no caller is left.
    """
    thread = weakref.ref(runtime._engine_thread)
    pid = os.getpid()

    def close() -> None:
        if (alive := thread()) is not None and os.getpid() == pid:
            alive.close()

    def stop_thread() -> None:
        atexit.unregister(close)
        if (alive := thread()) is not None and os.getpid() == pid:
            alive.request_stop()

    atexit.register(close)
    weakref.finalize(runtime, stop_thread).atexit = False

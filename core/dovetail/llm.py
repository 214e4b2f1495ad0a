"""Offline use: the engine in this process, driven by whoever calls ``generate``."""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dovetail.config import dump
from dovetail.errors import EngineError, RequestError
from dovetail.messages import AbortMsg, GenerateMsg, RequestFailed, TokenOutput
from dovetail.ops.random import derive_seed
from dovetail.plugins.machine import Machine
from dovetail.plugins.resolver import resolve
from dovetail.plugins.setup import setup
from dovetail.tokenizer import IncrementalDetokenizer, Tokenizer
from dovetail.types import FinishKind, FinishReason, SamplingParams, TokenLogprob

if TYPE_CHECKING:
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


class LLM:
    """A model, ready to generate. Has a ``Loop``; is not one.

    ``LLM("tiny", attention="torch_native", scheduler={"chunk_size": 256})``: the first argument is ``model.path`` or a
    whole ``Config``; keywords are sections of the config tree, as they would stand in a file; ``config_file`` is such a
    file. Raises ``ConfigError`` and ``PluginError`` as the server would. Not thread-safe.
    """

    def __init__(
        self, model: str | Config | None = None, /, *, config_file: str | Path | None = None, **sections: Any
    ) -> None:
        from dovetail.loop import Loop

        if isinstance(model, str):
            sections["model"] = {**sections.get("model", {}), "path": model}
        elif model is not None:
            sections = {**dump(model), **sections}
        files = [Path(config_file)] if config_file else []
        config, registry = setup(files, env=os.environ, arguments=sections)
        self.resolved = resolve(config, registry, Machine.detect(config.device))
        tokenizer_dir = Path(config.model.tokenizer) if config.model.tokenizer else self.resolved.model_dir
        self.tokenizer = Tokenizer.from_dir(tokenizer_dir) if (tokenizer_dir / "tokenizer.json").is_file() else None
        self.loop = Loop(self.resolved, self.tokenizer)
        self._ids = itertools.count()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Output]:
        """Generate for each prompt (text, or token ids); with ``n > 1`` the outputs of a prompt follow one another.

        ``params`` is one for all or one each. Raises ``RequestError`` if any request is refused, before or while the
        others run (they are aborted), and ``EngineError`` if its step failed.
        """
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        many: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item]
        each = (
            [params or SamplingParams()] * len(many)
            if params is None or isinstance(params, SamplingParams)
            else list(params)
        )
        if len(each) != len(many):
            raise RequestError(f"{len(each)} sampling params for {len(many)} prompts; give one, or one each")
        runs = [run for prompt, p in zip(many, each, strict=True) for run in self._start(prompt, p)]
        for _ in self._drive(runs):
            pass
        return [run.output for run in runs]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Generate one output and yield its text as it becomes final. Closing the iterator aborts the request."""
        params = params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream has one output", param="n")
        yield from self._drive(self._start(prompt, params))

    def chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Output:
        """Answer a conversation of {"role", "content"} messages, written out by the model's chat template."""
        return self.generate(self._tokens_of_chat(messages), params)[0]

    def stream_chat(self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None) -> Iterator[str]:
        """Like ``chat``, yielding text as it becomes final."""
        return self.stream(self._tokens_of_chat(messages), params)

    def close(self) -> None:
        """Free the engine's workers; the object must not be used again."""
        self.loop.close()

    def _tokens_of_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        tokenizer = self._need_tokenizer()
        return tokenizer.encode(tokenizer.apply_chat_template(list(messages)), add_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model was loaded without a tokenizer; give token ids, not text")
        return self.tokenizer

    def _start(self, prompt: Prompt, params: SamplingParams) -> list[_Run]:
        ids = self._need_tokenizer().encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        seed = params.seed if params.seed is not None else secrets.randbits(63)
        runs = [_Run(str(next(self._ids)), Output(ids), params, self.tokenizer) for _ in range(params.n)]
        for index, run in enumerate(runs):
            self.loop.handle(GenerateMsg(run.rid, ids, params, derive_seed(seed, index)))
        return runs

    def _drive(self, runs: list[_Run]) -> Iterator[str]:
        """Step until all runs are done, yielding the text of the first as it comes."""
        open_runs = {run.rid: run for run in runs}
        try:
            while open_runs:
                for answer in self.loop.step():
                    if isinstance(answer, RequestFailed) and answer.rid in open_runs:
                        del open_runs[answer.rid]
                        raise _error(answer)
                    if isinstance(answer, TokenOutput) and answer.rid in open_runs:
                        text = open_runs[answer.rid].take(answer)
                        if answer.finish is not None:
                            del open_runs[answer.rid]
                        if text:
                            yield text
        finally:
            for rid in open_runs:
                self.loop.handle(AbortMsg(rid))
            while open_runs and self.loop.has_work:
                self.loop.step()


class _Run:
    """One sequence being generated."""

    def __init__(self, rid: str, output: Output, params: SamplingParams, tokenizer: Tokenizer | None) -> None:
        self.rid = rid
        self.output = output
        self.detokenizer = tokenizer and IncrementalDetokenizer(
            tokenizer, params.stop, skip_special_tokens=params.skip_special_tokens, include_stop=params.include_stop
        )

    def take(self, answer: TokenOutput) -> str:
        output = self.output
        output.token_ids += answer.token_ids
        output.finish, output.cached_tokens = answer.finish, answer.cached_tokens
        output.drafted, output.accepted = answer.drafted, answer.accepted
        output.logprobs += answer.logprobs or []
        output.prompt_logprobs = answer.prompt_logprobs or output.prompt_logprobs
        if self.detokenizer is None:
            return ""
        text = self.detokenizer.push(answer.token_ids)
        if answer.finish is not None:
            text += self.detokenizer.finish()
            if answer.finish.kind is FinishKind.ERROR:
                raise EngineError(answer.finish.message or "the request failed")
        output.text += text
        return text


def _error(answer: RequestFailed) -> Exception:
    if answer.status == 400:
        return RequestError(answer.message, param=answer.param, code=answer.code)
    return EngineError(answer.message)

"""Provide ``LLM``, which runs the engine in the caller's process. Calls such as ``generate`` run the engine's steps themselves."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from dovetail.api.embeddings import cosine, embedding, label_probabilities, pooling_kind
from dovetail.api.requests import with_output_limit
from dovetail.chat.parsing import OutputParsers, load_parsers
from dovetail.chat.requests import plain_message, read_tool_choice, read_tools, template_tools
from dovetail.config import Config, dump
from dovetail.config.adapters import ADAPTER_NAME
from dovetail.errors import ConfigError, EngineError, RequestError
from dovetail.garbage import pause_collections
from dovetail.generation.expansion import expand
from dovetail.generation.prompts import PromptHooks, load_prompt_hooks
from dovetail.llm.arguments import (
    AdapterChoice,
    GroupHints,
    Params,
    Prompt,
    adapters_of_each,
    arguments_of,
    checked_messages,
    checked_variables,
    hints_of,
    joined_prompts,
    one_of,
    params_of_each,
    prompt_list,
    token_ids_of,
    with_path,
)
from dovetail.llm.interrupts import DeferredInterrupt
from dovetail.llm.runs import ChatOutput, ChatStream, Output, Run, chat_output
from dovetail.messages import (
    AbortMsg,
    Answer,
    CommandReply,
    FlushCacheMsg,
    LoadAdapterMsg,
    RequestFailed,
    TokenOutput,
    UnloadAdapterMsg,
)
from dovetail.ops.start import prepare_kernels
from dovetail.registry.candidates import call_hook
from dovetail.registry.machine import Machine
from dovetail.registry.resolver import resolve
from dovetail.registry.setup import setup
from dovetail.sampling_params import Pooling, PoolingKind, SamplingParams
from dovetail.tokenizer import Tokenizer, load_tokenizer
from dovetail.types import FloatArray


class LLM:
    """Load a model and generate with it.

    ``LLM("tiny", attention="torch_native", scheduler={"chunk_size": 256})``: the first argument is ``model.path`` or a complete
    ``Config``; keywords are sections of the config tree, as they are written in a config file; ``config_file`` is such a file.
    Raises ``ConfigError`` and ``PluginError`` as the server does. An ``LLM`` is not thread-safe.

    Ctrl-C takes effect between two steps: the requests of the interrupted call are aborted, a load of an adapter goes on during
    later calls, and the object can still be used. A second Ctrl-C takes effect at once. If it may have left the engine's state
    inconsistent, every later call raises ``EngineDeadError``.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Config | None = None,
        /,
        *,
        config_file: str | Path | None = None,
        **sections: Any,
    ) -> None:
        if isinstance(model, str | os.PathLike):
            sections["model"] = with_path(sections.get("model", {}), os.fspath(model))
        elif model is not None and not isinstance(model, Config):
            raise ConfigError(
                f"LLM(...) got {model!r:.80}; allowed: the name or path of a model, or a Config. Sections are keywords: "
                'LLM("tiny", quantization="fp8")'
            )
        elif model is not None:
            sections = {**dump(model), **sections}
        files = [Path(config_file)] if config_file else []
        with pause_collections():
            from dovetail.loop import Loop

            config, registry = setup(files, env=os.environ, arguments=sections)
            machine = Machine.detect(config.device)
            prepare_kernels(machine.device_type)
            self.resolved = resolve(config, registry, machine)
            has_tokenizer = config.model.tokenizer or (self.resolved.model_dir / "tokenizer.json").is_file()
            self.tokenizer = load_tokenizer(config) if has_tokenizer else None
        self._config, self._registry = config, registry
        self.loop = Loop(self.resolved, self.tokenizer)
        call_hook(self.resolved.hooks, "on_engine_start", info=self.loop.info)
        self._defaults: dict[str, Any] = dict(self.resolved.sampling_defaults)
        self._most_new: int | None = self._defaults.pop("max_new_tokens", None)
        self._ids = itertools.count()
        self._runs: dict[str, Run] = {}
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        sampling_params: Params | Sequence[Params] | None = None,
        group: str = "",
        group_size: int | None = None,
        session: str = "",
        adapter: AdapterChoice | Sequence[AdapterChoice] = None,
    ) -> list[Output]:
        """Generate for each prompt (text or token ids) and return the outputs; with ``n > 1`` the outputs of a prompt are adjacent.

        ``params`` is one for all prompts or one for each, and ``sampling_params`` another name for it. A mapping with the names of
        ``SamplingParams``, vLLM or SGLang is accepted too; what it does not set has the value of ``get_default_sampling_params``,
        and so have prompts without params. A ``SamplingParams`` states all values itself. ``group`` declares that the prompts have a common prefix, which is
        computed once and kept until ``group_size`` outputs have started (by default the number of outputs of this call). The outputs of
        one prompt form a group in any case. ``session`` keeps the text of the only output in the cache for the next call. ``adapter`` is the name of an adapter (LoRA), or one for each prompt (None: no adapter); an object with ``lora_name``
        and ``lora_path``, as vLLM's ``LoRARequest``, is loaded first if it is not known. Raises ``RequestError`` if a request is refused,
        before or while the others run (they are aborted), and ``EngineError`` if a step failed.
        """
        many = prompt_list(prompts)
        each = params_of_each(one_of(params, sampling_params), len(many), self._defaults)
        hints = hints_of(group, group_size, session, sum(p.n for p in each))
        names = [self._adapter_name(choice) for choice in adapters_of_each(adapter, len(many))]
        runs = [
            run for prompt, p, name in zip(many, each, names, strict=True) for run in self._make(prompt, p, hints, name)
        ]
        with DeferredInterrupt() as interrupt:
            for _ in self._drive(runs, interrupt):
                pass
        return [run.output for run in runs]

    def stream(
        self,
        prompt: Prompt,
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        group: str = "",
        group_size: int = 1,
        session: str = "",
        adapter: AdapterChoice = None,
    ) -> Iterator[str]:
        """Generate one output and yield its text as it becomes final. Closing the iterator aborts the request. Several streams can
        be read in turns, and ``generate`` can be called in between: all of them share the engine's steps. See ``generate`` for
        ``group``, ``session`` and ``adapter``; ``group_size`` is the number of outputs of the whole group."""
        params = params_of_each(one_of(params, sampling_params), 1, self._defaults)[0]
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a stream has one output", param="n")
        self._need_tokenizer()
        name = self._adapter_name(adapter)
        return self._stream(self._make(prompt, params, hints_of(group, group_size, session, 1), name))

    def _chat_run(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        separate_reasoning: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        group: str = "",
        group_size: int = 1,
        session: str = "",
        adapter: AdapterChoice = None,
    ) -> Run:
        """Return the run of the only output of a chat. ``chat`` and ``chat_stream`` take the same arguments."""
        hints = hints_of(group, group_size, session, 1)
        params = params_of_each(one_of(params, sampling_params), 1, self._defaults)[0]
        if params.n != 1:
            raise RequestError(f"n is {params.n}; a chat has one output", param="n")
        specs, choice = read_tools(tools, tool_choice)
        requested = read_tool_choice(specs, choice, parallel_tool_calls)
        shown = template_tools(specs) if requested is not None else []
        prompt = self._chat_prompt(messages, shown, {} if chat_template_kwargs is None else chat_template_kwargs)
        plan = self._parsers.plan(params, prompt, requested, separate_reasoning)
        reader = plan.reader()
        (run,) = self._make(self._encoded(prompt), plan.params, hints, self._adapter_name(adapter))
        run.read_with(reader)
        return run

    @arguments_of(_chat_run)
    def chat(self, *args: Any, **kwargs: Any) -> ChatOutput:
        """Answer a chat, which the model's chat template turns into a prompt. The output is constrained and read as in
        /v1/chat/completions, and the arguments have the names of its fields. See ``generate`` for ``group``, ``session`` and
        the exceptions; ``group_size`` is the number of outputs of the whole group."""
        run = self._chat_run(*args, **kwargs)
        with DeferredInterrupt() as interrupt:
            for _ in self._drive([run], interrupt):
                pass
        return chat_output(run)

    @arguments_of(_chat_run)
    def chat_stream(self, *args: Any, **kwargs: Any) -> ChatStream:
        """Answer a chat as ``chat`` does, and stream the answer. Each item of the iteration is what a step
        added to reasoning, content and tool calls; ``output`` of the stream is the answer so far. Closing the stream aborts
        the request."""
        run = self._chat_run(*args, **kwargs)
        return ChatStream(run, self._stream([run]))

    def stream_chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: Params | None = None,
        *,
        sampling_params: Params | None = None,
        group: str = "",
        group_size: int = 1,
        session: str = "",
    ) -> Iterator[str]:
        """Answer a chat and yield everything that the model writes, as it becomes final. Reasoning and its marks are included;
        ``chat_stream`` separates them."""
        prompt = self._encoded(self._chat_prompt(messages, [], {}))
        params = params_of_each(one_of(params, sampling_params), 1, self._defaults)[0]
        return self.stream(prompt, params, group=group, group_size=group_size, session=session)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: PoolingKind | str | None = None,
        normalize: bool = True,
        dimensions: int | None = None,
    ) -> list[FloatArray]:
        """Return a float32 vector for each prompt: the model's last hidden state at the last token (``pooling="last"``) or its mean
        over the tokens (``"mean"``; None selects the model's own pooling), cut to ``dimensions`` and, if ``normalize`` is set,
        scaled to length 1. Raises ``RequestError``, also for a model that does not offer model.embed."""
        kind = pooling_kind(pooling, self._info["embedding"])
        outputs = self.generate(prompts, SamplingParams(max_new_tokens=0, pooling=Pooling(kind)))
        vectors = [output.pooled for output in outputs if output.pooled is not None]
        assert len(vectors) == len(outputs), "each request with pooling is answered with a vector"
        return [embedding(vector, dimensions, normalize=normalize) for vector in vectors]

    @arguments_of(embed)
    def encode(self, *args: Any, **kwargs: Any) -> list[FloatArray]:
        """Return the embeddings of prompts: another name of ``embed``, with the same arguments."""
        return self.embed(*args, **kwargs)

    def score(
        self,
        query: Prompt | Sequence[Prompt],
        items: Prompt | Sequence[Prompt],
        label_token_ids: Sequence[int] | None = None,
        *,
        apply_softmax: bool = False,
        item_first: bool = False,
        pooling: PoolingKind | str | None = None,
    ) -> list[float] | list[list[float]]:
        """Score each item against the query.

        Without ``label_token_ids``, as in vLLM, return the cosine of the embeddings of query and item; ``query`` may be a
        list with one entry for each item. With them, as in SGLang, return for each item the probability of each label as
        the token after query and item (or item and query, with ``item_first``); with ``apply_softmax`` relative to the
        labels only. Raises ``RequestError``.
        """
        queries, listed = prompt_list(query), prompt_list(items)
        if len(queries) not in (1, len(listed)):
            raise RequestError(f"query has {len(queries)} entries and items {len(listed)}; give one query, or as many")
        queries = queries * len(listed) if len(queries) == 1 else queries
        if label_token_ids is not None:
            if pooling is not None:
                raise RequestError("pooling applies to embeddings; leave it out, or leave out label_token_ids")
            prompts = joined_prompts(queries, listed, item_first)
            return self._label_scores(prompts, tuple(label_token_ids), apply_softmax)
        if apply_softmax or item_first:
            raise RequestError("apply_softmax and item_first need label_token_ids", param="label_token_ids")
        vectors = self.embed([*queries, *listed], pooling=pooling)
        return [cosine(a, b) for a, b in zip(vectors[: len(listed)], vectors[len(listed) :], strict=True)]

    def _label_scores(self, prompts: list[Prompt], labels: tuple[int, ...], among_labels: bool) -> list[list[float]]:
        params = SamplingParams(max_new_tokens=0, pooling=Pooling(PoolingKind.LABELS, labels))
        outputs = self.generate(prompts, params, group=f"score-{next(self._ids)}")
        pooled = [output.pooled for output in outputs if output.pooled is not None]
        assert len(pooled) == len(prompts), "each request with pooling is answered with a vector"
        return [label_probabilities(vector, among_labels=among_labels) for vector in pooled]

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling params of a call that gives none: those that the model's authors recommend in
        generation_config.json (``model.generation_config``), as vLLM's method of this name does."""
        return SamplingParams(**self._defaults, max_new_tokens=self._most_new)

    def flush_cache(self) -> None:
        """Drop every cached prefix, as SGLang's method of this name and ``reset_prefix_cache`` of vLLM do. Raises
        ``RequestError`` while a stream is open."""
        self._need_open()
        while self.loop.has_work and not self._runs:  # what is left of aborted requests
            self.loop.step()
        if self._runs:
            raise RequestError(f"{len(self._runs)} requests are running; read or close their streams first")
        self.loop.handle(FlushCacheMsg("flush"))
        (reply,) = self.loop.step()
        assert isinstance(reply, CommandReply), "nothing else has an answer"
        if not reply.ok:
            raise RequestError(f"the cache was not flushed: {reply.message}")

    def close(self) -> None:
        """Free the engine's workers. Other calls raise ``EngineError`` from now on, also those of open streams; ``close`` has no
        further effect."""
        if self._closed:
            return
        self._closed = True
        if self.loop.dead is None:
            call_hook(self.resolved.hooks, "on_engine_stop")
        self.loop.close()

    def shutdown(self) -> None:
        """Close the engine: another name of ``close``."""
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def _parsers(self) -> OutputParsers:
        return load_parsers(self._info, self._config, self._need_tokenizer(), self._registry)

    def _chat_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
    ) -> str:
        plain = [plain_message(message, i) for i, message in enumerate(checked_messages(messages))]
        messages = self._prompts.messages(plain)
        own = self._parsers.assistant_marks
        extra = checked_variables(extra)
        return self._need_tokenizer().apply_chat_template(messages, tools or None, True, extra, "", own)

    @cached_property
    def _prompts(self) -> PromptHooks:
        return load_prompt_hooks(self._info, self._config, self._registry)

    def _text_ids(self, prompt: str) -> list[int]:
        return self._need_tokenizer().encode(self._prompts.text(prompt))

    def _encoded(self, prompt: str) -> list[int]:
        return self._need_tokenizer().encode(prompt, add_special_tokens=False)

    def _need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError("this model was loaded without a tokenizer; give token ids, not text")
        return self.tokenizer

    @property
    def _info(self) -> dict[str, Any]:
        self._need_open()
        return self.loop.info

    def _need_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM was closed; create another one")

    def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        """Load an adapter (LoRA) that PEFT has saved, or replace the one of this name. Raises ``RequestError`` if it is refused."""
        if not ADAPTER_NAME.fullmatch(name):
            raise RequestError(
                f"the adapter has the name {name!r:.80}; allowed: up to 256 characters, without @ and control characters"
            )
        self._command(LoadAdapterMsg(self._call_id(), name, os.fspath(directory)))

    def unload_adapter(self, name: str) -> None:
        """Refuse new requests for an adapter; those that run go on. Raises ``RequestError`` if it is not known."""
        self._command(UnloadAdapterMsg(self._call_id(), name))

    def _adapter_name(self, choice: AdapterChoice) -> str:
        """Return the name of an adapter, which is loaded if ``choice`` has a path and the name is not known. Raises ``RequestError``."""
        if choice is None or isinstance(choice, str):
            return choice or ""
        name, path = choice.lora_name, os.fspath(choice.lora_path)
        known = self.loop.scheduler.adapters.known.get(name)
        if known is None:
            self.load_adapter(name, path)
        elif known.directory != path and os.path.realpath(known.directory) != os.path.realpath(path):
            raise RequestError(
                f"lora_path is {path!r:.200}, and the adapter {name!r:.80} was loaded from {known.directory!r:.200}; give "
                "another lora_name, or replace the adapter with load_adapter first",
                param="adapter",
            )
        return name

    def _call_id(self) -> str:
        return f"call-{next(self._ids)}"

    def _command(self, msg: LoadAdapterMsg | UnloadAdapterMsg) -> None:
        """Carry out a command. Requests that run go on meanwhile. Answers to earlier commands, which Ctrl-C has interrupted, are ignored."""
        self._need_open()
        reply: CommandReply | None = None
        with DeferredInterrupt() as interrupt:
            self.loop.handle(msg)
            while reply is None:
                interrupt.release()
                replies = (answer for answer in self._step() if isinstance(answer, CommandReply))
                reply = next((each for each in replies if each.call_id == msg.call_id), None)
        if not reply.ok:
            raise RequestError(reply.message, param="adapter")

    def _make(self, prompt: Prompt, params: SamplingParams, hints: GroupHints, adapter: str = "") -> list[Run]:
        """Return one run for each of the prompt's outputs. Nothing is sent to the engine yet."""
        ids = self._text_ids(prompt) if isinstance(prompt, str) else token_ids_of(prompt)
        if params.thinking_budget is not None and params.thinking_span is None:
            text = prompt if isinstance(prompt, str) else self._need_tokenizer().decode(ids, skip_special_tokens=False)
            params = self._parsers.with_thinking_budget(params, text)
        if self._most_new is not None:
            params = with_output_limit(params, max(min(self._most_new, self._info["context_len"] - len(ids)), 1))
        rids = [str(next(self._ids)) for _ in range(params.n)]
        msgs = expand(
            ids,
            params,
            rids,
            group=hints.group,
            group_size=hints.group_size,
            session=hints.session,
            adapter=adapter,
            adapter_param="adapter",
        )
        return [Run(msg, self.tokenizer) for msg in msgs]

    def _stream(self, runs: list[Run]) -> Generator[str, None, None]:
        """Drive ``runs`` and yield the text of the first one. Ctrl-C is deferred while a step runs, not while the caller handles
        a yielded text."""
        interrupt = DeferredInterrupt()
        pieces = self._drive(runs, interrupt)
        try:
            while True:
                with interrupt:
                    text = next(pieces, None)
                if text is None:
                    return
                yield text
        finally:
            with interrupt:
                pieces.close()

    def _drive(self, runs: list[Run], interrupt: DeferredInterrupt) -> Generator[str, None, None]:
        """Run steps until all runs have ended, and yield the text of the first one as it arrives. Raises the error that ended a run."""
        pending, num_open, ended = deque(runs), len(runs), list[Run]()
        try:
            while num_open:
                if not ended:
                    self._submit(pending, ended)
                    self._step()
                    interrupt.release()
                for run in ended:
                    if run.error is not None:
                        raise run.error
                num_open -= len(ended)
                ended.clear()
                if text := runs[0].take_fresh():
                    yield text
        finally:
            self._abandon(runs)

    def _submit(self, pending: deque[Run], ended: list[Run]) -> None:
        """Send runs to the engine until the waiting queue is full."""
        self._need_open()
        scheduler = self.loop.scheduler
        while pending and len(scheduler.waiting) < scheduler.limits.max_waiting:
            run = pending.popleft()
            self._runs[run.msg.rid] = run
            run.ended = ended
            self.loop.handle(run.msg)

    def _step(self) -> list[Answer]:
        """Run one step of the engine and pass its outputs to their runs, which may belong to other calls. Return its answers."""
        answers = self.loop.step()
        if not answers and not self.loop.has_work:
            raise EngineError("an interrupt has discarded the outputs of the last step; call again")
        for answer in answers:
            if isinstance(answer, TokenOutput | RequestFailed) and (run := self._runs.get(answer.rid)) is not None:
                run.take(answer)
                if run.error is not None or run.output.finish is not None:
                    del self._runs[answer.rid]
                    if run.stopped:
                        self.loop.handle(AbortMsg(answer.rid))
                    run.ended.append(run)
        return answers

    def _abandon(self, runs: list[Run]) -> None:
        """Abort the runs among ``runs`` that have not ended."""
        unfinished = [rid for run in runs if self._runs.pop(rid := run.msg.rid, None) is not None]
        if self._closed or self.loop.dead is not None:
            return
        for rid in unfinished:
            self.loop.handle(AbortMsg(rid))
        aborted = unfinished or any(run.stopped for run in runs)
        while aborted and not self._runs and self.loop.has_work:
            self.loop.step()

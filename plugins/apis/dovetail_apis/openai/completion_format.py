"""Format the answers of /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import msgspec

from dovetail.api.responses import SSE, event
from dovetail.interfaces.api import ApiHost, ApiProblem, Choice, Delta, Generation
from dovetail.types import TokenLogprob
from dovetail_apis.openai.format import (
    CompletionLogprobs,
    choice_usage,
    error_json,
    extensions,
    finish_name,
    prompt_logprobs_json,
    stop_fields,
    usage_json,
)
from dovetail_apis.openai.types import CompletionRequest


def best(choices: Sequence[Choice], n: int) -> list[Choice]:
    """Return the ``n`` choices whose tokens have the highest average log-probability, the best first."""

    def unlikely(choice: Choice) -> float:
        return -fmean(one.logprob or 0.0 for one in choice.logprobs) if choice.logprobs else 0.0

    return sorted(choices, key=unlikely)[:n]


class CompletionFormat:
    """Format the answers to one completion request, whole or in chunks."""

    media_type = SSE

    def __init__(self, host: ApiHost, body: CompletionRequest, texts: Sequence[Any], outputs: Generation) -> None:
        self._outputs = outputs
        self._body = body
        self._tokenizer = host.tokenizer
        self._echo = [self._text(text) for text in texts] if body.echo else None
        self._n = body.n or 1
        self._made = max(body.best_of or 1, self._n)
        self._with_logprobs = body.logprobs is not None
        self._logprobs = [
            CompletionLogprobs(host.tokenizer, bool(body.return_tokens_as_token_ids)) for _ in outputs.choices
        ]
        self._started: set[int] = set()
        self._include_usage = body.include_usage
        self._common = {
            "id": outputs.rid,
            "object": "text_completion",
            "created": int(time.time()),
            "model": host.model_name,
        }
        self._before = b"data: " + msgspec.json.encode(self._common)[:-1] + b',"choices":[{"index":'
        self._after = b"}]" + (b',"usage":null' if body.include_usage else b"") + b"}\n\n"
        self._unfinished = len(outputs.choices)

    def whole(self, outputs: Generation) -> object:
        """Return the complete answer."""
        choices = [
            {
                "index": index,
                "text": self._echoed(choice) + choice.text,
                "logprobs": self._lists(choice, [*self._echoed_logprobs(choice), *choice.visible_logprobs]),
                "finish_reason": finish_name(choice.finish),
                **stop_fields(choice.finish, self._body.stop_token_ids),
                **self._ids_of(choice, choice.token_ids, first=True),
                **self._prompt_logprobs(choice),
            }
            for index, choice in enumerate(self._chosen(outputs.choices))
        ]
        return {**self._common, "choices": choices, "usage": usage_json(outputs.usage), **self._details()}

    def _chosen(self, choices: Sequence[Choice]) -> list[Choice]:
        if self._made == self._n:
            return list(choices)
        return [
            choice for i in range(0, len(choices), self._made) for choice in best(choices[i:][: self._made], self._n)
        ]

    def head(self) -> bytes:
        """Return nothing: the prompt is sent with the first token, because its logprobs are known only then."""
        return b""

    def deltas(self, deltas: Sequence[Delta]) -> bytes:
        """Return the chunks of one step."""
        return b"".join(self._delta(delta) for delta in deltas)

    def tail(self) -> bytes:
        """Return the token counts, if the client requests them, and the end marker."""
        if not self._include_usage:
            return event(b"[DONE]")
        last = {**self._common, "choices": [], "usage": usage_json(self._outputs.usage)}
        return event(msgspec.json.encode(last)) + event(b"[DONE]")

    def failed(self, problem: ApiProblem) -> bytes:
        """Return the error as an event."""
        return event(msgspec.json.encode(error_json(problem)))

    def _delta(self, delta: Delta) -> bytes:
        choice, text, entries = delta.choice, delta.text, delta.logprobs
        first = choice.index not in self._started
        if first:
            self._started.add(choice.index)
            text, entries = self._echoed(choice) + text, [*self._echoed_logprobs(choice), *entries]
        more = self._ids_of(choice, delta.token_ids, first)
        if not (text or delta.finish or (self._with_logprobs and entries) or more.get("token_ids")):
            return b""
        after = self._usage_of(choice) if self._body.continuous_usage else self._after
        if delta.finish:
            more |= stop_fields(delta.finish, self._body.stop_token_ids)
            after = self._with_details(after)
        return b'%b%d,"text":%b,"logprobs":%b,"finish_reason":%b%b%b' % (
            self._before,
            choice.index,
            msgspec.json.encode(text),
            msgspec.json.encode(self._lists(choice, entries)),
            msgspec.json.encode(finish_name(delta.finish)),
            b"," + msgspec.json.encode(more)[1:-1] if more else b"",
            after,
        )

    def _with_details(self, after: bytes) -> bytes:
        """Return the end of a choice's last chunk. The last of all has the details, not a chunk of their own without
        choices: SGLang's bench_serving reads the text of a choice in every chunk of completions."""
        self._unfinished -= 1
        details = {} if self._unfinished else self._details()
        return after[:-3] + b"," + msgspec.json.encode(details)[1:] + b"\n\n" if details else after

    def _usage_of(self, choice: Choice) -> bytes:
        return b'}],"usage":%b}\n\n' % msgspec.json.encode(choice_usage(choice))

    def _ids_of(self, choice: Choice, token_ids: Sequence[int], first: bool) -> dict[str, Any]:
        """Return the token ids of a choice, if the client requests them: those of the prompt only at ``first``."""
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": token_ids, **({"prompt_token_ids": choice.prompt_ids} if first else {})}

    def _prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        top = self._body.prompt_logprobs
        return {} if top is None else {"prompt_logprobs": prompt_logprobs_json(self._tokenizer, choice, top)}

    def _details(self) -> dict[str, Any]:
        return extensions(self._body, self._outputs)

    def _echoed_logprobs(self, choice: Choice) -> list[TokenLogprob]:
        """Return the log-probabilities of the echoed prompt. ``prompt_logprobs`` may have required more of them."""
        if not self._echo:
            return []
        top = self._body.logprobs or 0
        return [replace(entry, top=entry.top[:top]) for entry in choice.prompt_logprobs]

    def _lists(self, choice: Choice, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return self._logprobs[choice.index].add(entries) if self._with_logprobs else None

    def _echoed(self, choice: Choice) -> str:
        return self._echo[choice.index // self._made] if self._echo else ""

    def _text(self, prompt: str | list[int]) -> str:
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

"""Call a Dovetail server through its native API."""

from __future__ import annotations

import contextlib
import json
import socket
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import httpx

from dovetail.errors import DovetailError, EngineError, RequestError
from dovetail.lang.backends.answers import error_text, lines_of, message_of, refusal
from dovetail.lang.backends.base import Backend, Features, Generated, OnText, ReuseHints, joined_scores
from dovetail.lang.backends.params import CONSTRAINTS, native_params
from dovetail.lang.choices import Scored
from dovetail.lang.conversation import Conversation, Template
from dovetail.lang.ir import SamplingOptions

if TYPE_CHECKING:
    from dovetail.templates.chat_template import ChatTemplate

_PREFILL = {"max_new_tokens": 0, "temperature": 0.0}
_LOOK_BACK = 4  # tokens before a choice that may be tokenized differently with it; more are compared if these all are


class RuntimeEndpoint(Backend):
    """Call the server at ``base_url``.

    ``timeout`` is the maximum duration of a request in seconds; ``verify`` is httpx's option. The chat template is the
    server's unless ``chat_template`` (Jinja) is given.
    """

    features = Features(scores=True, prefills=True, constraints=CONSTRAINTS)

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: Any = None,
        chat_template: str | None = None,
        *,
        timeout: float = 600.0,
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # idle connections expire by age only: a full pool could close a connection that a thread has just received
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        self.base_url = base_url.rstrip("/")
        self._given = chat_template
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._client = httpx.Client(
            base_url=self.base_url,
            headers=headers,
            verify=True if verify is None else verify,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=limits,
        )

    def __repr__(self) -> str:
        return f"RuntimeEndpoint({self.base_url!r})"

    @cached_property
    def model_info(self) -> dict[str, Any]:
        """Return what the server reports about its model."""
        return self._request("GET", "/model_info")

    @cached_property
    def _template(self) -> ChatTemplate | None:
        from dovetail.templates.chat_template import ChatTemplate

        source = self._given or self.model_info.get("chat_template")
        return ChatTemplate(source, self.model_info.get("special_tokens") or {}) if source else None

    def template(self) -> Template:
        """Return the served model's chat template."""

        def written(messages: Sequence[dict[str, Any]], opened: bool) -> str:
            if self._template is None:
                raise RequestError(
                    f"the model at {self.base_url} has no chat template; give RuntimeEndpoint(..., chat_template=...), or "
                    "a program without system, user and assistant"
                )
            return self._template.render(self._template.variables(messages, None, opened, {}))

        return written

    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """See ``Backend.generate``."""
        self.check(conversation, sampling)
        if (sampling.n or 1) > 1:
            hints = replace(hints, session="")  # a session continues one text only
        body = {"text": self._text(conversation), "sampling_params": native_params(sampling), **_hinted(hints)}
        names = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
        body |= {name: value for name in names if (value := getattr(sampling, name)) is not None}
        if on_text is not None and (sampling.n or 1) == 1:
            answers = [self._streamed(body, on_text)]
        else:
            answer = self._request("POST", "/generate", body)
            answers = answer if isinstance(answer, list) else [answer]
            if on_text is not None:
                on_text(answers[0]["text"])
        return [Generated(each["text"], each["meta_info"]) for each in answers]

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        """Compute the prompt once, then the choices together on top of it; see ``Backend.score``."""
        self.check(conversation, SamplingOptions())
        text = self._text(conversation)
        first = self._request("POST", "/generate", {"text": text, "sampling_params": _PREFILL, **_hinted(hints)})
        meta = {name: first["meta_info"][name] for name in ("prompt_tokens", "cached_tokens")}
        scored = self._scored(text, choices, meta["prompt_tokens"])
        if unconditional:
            scored = self._with_unconditional(scored)
        return scored, meta

    def prefill(self, text: str, chat: bool) -> None:
        """See ``Backend.prefill``."""
        self._request("POST", "/generate", {"text": self._without_bos(text, chat), "sampling_params": _PREFILL})

    def flush_cache(self) -> None:
        """See ``Backend.flush_cache``."""
        self._request("POST", "/flush_cache")

    def server_info(self) -> dict[str, Any]:
        """Return the answer of /server_info."""
        return self._request("GET", "/server_info")

    def close(self) -> None:
        """End running calls with an error, and close the connections."""
        for connected in list(self._sockets):
            with contextlib.suppress(OSError):  # closed by the other side
                connected.shutdown(socket.SHUT_RDWR)  # wakes the threads that read from it, which closing does not
        self._client.close()

    def _text(self, conversation: Conversation) -> str:
        text = self._without_bos(conversation.text(self.template()), conversation.chat)
        if not text:
            raise RequestError("the prompt is empty; append text before the first gen(...)", param="prompt")
        return text

    def _without_bos(self, text: str, chat: bool) -> str:
        """Remove the BOS that a chat template has rendered, because the server adds one to texts."""
        info = self.model_info if chat else {}
        bos = (info.get("special_tokens") or {}).get("bos_token")
        return text.removeprefix(bos) if bos and info.get("adds_bos") else text

    def _scored(self, text: str, choices: Sequence[str], length: int) -> list[Scored]:
        """Score each choice after ``text``, which has ``length`` tokens without a choice."""
        texts, back = [text, *(text + choice for choice in choices)], _LOOK_BACK
        while True:
            start = max(length - back, 1)
            prompt, *found = self._logprobs({"text": texts}, start)
            tokens = [token for token, _ in prompt]
            if start == 1 or all(tokens[:1] == [token for token, _ in each[:1]] for each in found):
                return joined_scores(tokens, [[(t, p or 0.0) for t, p in each] for each in found])
            back *= 8

    def _logprobs(self, prompts: Mapping[str, Any], start: int) -> list[list[tuple[int, float | None]]]:
        body = {**prompts, "sampling_params": _PREFILL, "return_logprob": True, "logprob_start_len": start}
        answers = self._request("POST", "/generate", body)
        return [[(token, p) for p, token, _ in each["meta_info"]["input_token_logprobs"]] for each in answers]

    def _with_unconditional(self, scored: Sequence[Scored]) -> list[Scored]:
        bos = self.model_info.get("bos_token_id")
        before = [] if bos is None else [bos]
        known = [each for each in scored if each.tokens]
        found = self._logprobs({"input_ids": [[*before, *each.tokens] for each in known]}, 0) if known else []
        alone = {each.tokens: tuple(p for _, p in row[len(before) :]) for each, row in zip(known, found, strict=True)}
        return [replace(each, unconditional=alone.get(each.tokens, ())) for each in scored]

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        response = self._reached(
            lambda: self._client.request(method, path, json=body, extensions={"trace": self._connected})
        )
        if response.is_error:
            raise _refused(response)
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def _streamed(self, body: Mapping[str, Any], on_text: OnText) -> dict[str, Any]:
        """Return one output and pass on its text as it grows; every event contains the whole text so far."""
        return self._reached(lambda: self._read_stream(body, on_text))

    def _read_stream(self, body: Mapping[str, Any], on_text: OnText) -> dict[str, Any]:
        answer: dict[str, Any] | None = None
        streaming, watched = {**body, "stream": True}, {"trace": self._connected}
        with self._client.stream("POST", "/generate", json=streaming, extensions=watched) as response:
            if response.status_code != 200:
                response.read()
                raise _refused(response)
            for event in _events(response):
                if "error" in event:
                    raise EngineError(message_of(event))
                on_text(event["text"][len(answer["text"]) if answer else 0 :])
                answer = event
        if answer is None or answer["meta_info"]["finish_reason"] is None:
            raise EngineError(f"{self.base_url} ended a stream before its output was complete")
        return answer

    def _connected(self, event: str, info: Mapping[str, Any]) -> None:
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._sockets.add(info["return_value"].get_extra_info("socket"))

    def _reached(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except httpx.HTTPError as error:
            raise EngineError(f"{self.base_url} did not answer: {type(error).__name__}: {error}") from error
        except RuntimeError as error:  # httpx raises it after the client was closed
            raise EngineError(f"{self!r} was closed; make a new one") from error


def _hinted(hints: ReuseHints) -> dict[str, Any]:
    body: dict[str, Any] = {"group": hints.group, "group_size": hints.group_size} if hints.group else {}
    return {**body, "session": hints.session} if hints.session else body


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in lines_of(response):
        data = line.removeprefix(b"data: ")
        if data is not line and data != b"[DONE]":
            yield json.loads(data)


def _refused(response: httpx.Response) -> DovetailError:
    status = response.status_code
    return refusal(status, f"{response.request.url} answered {status}: {error_text(response.content)}")

"""Call OpenAI's API, and servers that implement it, through the official client."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.errors import RequestError
from dovetail.lang.backends.base import Backend, Features, Generated, OnText, ReuseHints
from dovetail.lang.backends.sdk import client_package, message_body, messages_of, settings, translated_errors
from dovetail.lang.choices import Scored
from dovetail.lang.conversation import Conversation, Template, labelled
from dovetail.lang.ir import SamplingOptions

_SAME = ("n", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty", "seed")
_CHAT = {**{name: name for name in _SAME}, "max_tokens": "max_completion_tokens"}
_CHAT |= {"return_logprob": "logprobs", "top_logprobs_num": "top_logprobs"}
_TEXT = {**{name: name for name in _SAME}, "max_tokens": "max_tokens"}


class OpenAI(Backend):
    """Call a model of OpenAI's API: ``OpenAI("gpt-4o-mini")``.

    Further arguments are passed to the official client (``base_url``, ``api_key``, ``timeout``, ...); ``is_azure`` uses
    its Azure class.

    ``is_chat_model`` selects the endpoint; None selects chat unless the name contains ``instruct``. A chat model
    generates whole messages: ``gen(...)`` must be first in ``assistant(...)``. ``select`` needs a completions model
    that returns the log-probabilities of its prompt. ``chat_template`` renders the messages of a program for a
    completions model.
    """

    def __init__(
        self,
        model_name: str,
        is_chat_model: bool | None = None,
        chat_template: Template | None = None,
        is_azure: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._package = client_package("openai")
        self.model_name = model_name
        self.is_chat_model = "instruct" not in model_name if is_chat_model is None else is_chat_model
        self._client = (self._package.AzureOpenAI if is_azure else self._package.OpenAI)(*args, **kwargs)
        self._template = chat_template or labelled
        schema = frozenset({"json_schema"}) if self.is_chat_model else frozenset[str]()
        chat = self.is_chat_model
        self.features = Features(scores=not chat, images=chat, continues=not chat, constraints=schema)  # pyright: ignore

    def __repr__(self) -> str:
        return f"OpenAI({self.model_name!r})"

    def template(self) -> Template:
        """Return the template for displaying a conversation, and for completions models."""
        return self._template

    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """See ``Backend.generate``."""
        self.check(conversation, sampling)
        with translated_errors(self._package, repr(self)):
            if self.is_chat_model:
                return self._chat(conversation, sampling, on_text)
            return self._complete(conversation, sampling, on_text)

    def score(
        self, conversation: Conversation, choices: Sequence[str], unconditional: bool, hints: ReuseHints
    ) -> tuple[list[Scored], Mapping[str, Any]]:
        """Score choices with completions that echo their prompt; see ``Backend.score``."""
        if self.is_chat_model:
            raise RequestError(
                f"{self!r} is a chat model, which returns no log-probabilities of a given text; select needs a "
                "completions model (is_chat_model=False) or a Dovetail backend"
            )
        text = conversation.text(self._template)
        with translated_errors(self._package, repr(self)):
            scored = self._echoed([text + choice for choice in choices], len(text))
            if unconditional:
                alone = self._echoed(list(choices), 0)
                scored = [Scored(a.tokens, a.logprobs, (None, *b.logprobs)) for a, b in zip(scored, alone, strict=True)]
        return scored, {}

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _chat(self, conversation: Conversation, sampling: SamplingOptions, on_text: OnText | None) -> list[Generated]:
        body = settings(sampling, _CHAT, repr(self))
        body |= {"model": self.model_name, "messages": [message_body(m, _picture) for m in messages_of(conversation)]}
        if sampling.constraint is not None:
            schema = {"name": "output", "strict": True, "schema": json.loads(sampling.constraint[1])}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        create = self._client.chat.completions.create
        if on_text is not None and (sampling.n or 1) == 1:
            return [_streamed(create, body, on_text, lambda choice: choice.delta.content)]
        answer = create(**body)
        return _answers(answer, [choice.message.content for choice in answer.choices], on_text)

    def _complete(
        self, conversation: Conversation, sampling: SamplingOptions, on_text: OnText | None
    ) -> list[Generated]:
        body = settings(sampling, _TEXT, repr(self))
        body |= {"model": self.model_name, "prompt": conversation.text(self._template)}
        create = self._client.completions.create
        if on_text is not None and (sampling.n or 1) == 1:
            return [_streamed(create, body, on_text, lambda choice: choice.text)]
        answer = create(**body)
        return _answers(answer, [choice.text for choice in answer.choices], on_text)

    def _echoed(self, prompts: list[str], begin: int) -> list[Scored]:
        """Return the tokens of each prompt, starting at the first token that any prompt has beyond its first
        ``begin`` characters."""
        found = self._client.completions.create(
            model=self.model_name, prompt=prompts, max_tokens=0, temperature=0, echo=True, logprobs=1
        )
        shown = [choice.logprobs for choice in sorted(found.choices, key=lambda choice: choice.index)]
        ends = [[*each.text_offset[1:], len(text)] for each, text in zip(shown, prompts, strict=True)]
        first = min(next(i for i, end in enumerate(each) if end > begin) for each in ends)
        rows = [[p for p in each.token_logprobs[first:] if p is not None] for each in shown]
        return [Scored((-1,) * len(row), tuple(row)) for row in rows]


def _picture(kind: str, data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data if kind == "url" else f"data:{kind};base64,{data}"}}


def _answers(answer: Any, texts: list[str | None], on_text: OnText | None) -> list[Generated]:
    if on_text is not None:
        on_text(texts[0] or "")
    return [
        Generated(text or "", _meta(choice.finish_reason, answer.usage, choice.logprobs))
        for text, choice in zip(texts, answer.choices, strict=True)
    ]


def _streamed(create: Any, body: Mapping[str, Any], on_text: OnText, text_of: Any) -> Generated:
    pieces, finish, usage = list[str](), None, None
    with create(**body, stream=True, stream_options={"include_usage": True}) as events:
        for event in events:
            usage = event.usage or usage
            for choice in event.choices:
                finish = choice.finish_reason or finish
                if piece := text_of(choice):
                    pieces.append(piece)
                    on_text(piece)
    return Generated("".join(pieces), _meta(finish, usage))


def _meta(finish: str | None, usage: Any, logprobs: Any = None) -> dict[str, Any]:
    details = getattr(usage, "prompt_tokens_details", None)
    meta: dict[str, Any] = {
        "finish_reason": finish and {"type": finish},
        "prompt_tokens": getattr(usage, "prompt_tokens", None),
        "completion_tokens": getattr(usage, "completion_tokens", None),
        "cached_tokens": getattr(details, "cached_tokens", None) or 0,
    }
    return meta if logprobs is None else {**meta, "logprobs": logprobs.model_dump()}

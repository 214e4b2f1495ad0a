"""Call Anthropic's API, and servers that implement it, through the official client."""

from __future__ import annotations

import json
from typing import Any

from dovetail.errors import RequestError
from dovetail.lang.backends.base import Backend, Features, Generated, OnText, ReuseHints
from dovetail.lang.backends.sdk import client_package, message_body, messages_of, settings, translated_errors
from dovetail.lang.conversation import Conversation, Template, labelled
from dovetail.lang.ir import SamplingOptions

_NAMES = {
    "max_tokens": "max_tokens",
    "stop": "stop_sequences",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
}
_TYPED = ("max_tokens", "stop_sequences")
_SAMPLING = ("temperature", "top_p", "top_k")  # not every model accepts them, and the client has no arguments for them


class Anthropic(Backend):
    """Call a model of Anthropic's API: ``Anthropic("claude-...")``. Further arguments are passed to the official
    client."""

    features = Features(images=True, constraints=frozenset({"json_schema"}))

    def __init__(self, model_name: str, *args: Any, **kwargs: Any) -> None:
        self._package = client_package("anthropic")
        self.model_name = model_name
        self._client = self._package.Anthropic(*args, **kwargs)

    def __repr__(self) -> str:
        return f"Anthropic({self.model_name!r})"

    def template(self) -> Template:
        """Return the template for displaying a conversation."""
        return labelled

    def generate(
        self, conversation: Conversation, sampling: SamplingOptions, hints: ReuseHints, on_text: OnText | None = None
    ) -> list[Generated]:
        """Generate one output; see ``Backend.generate``."""
        self.check(conversation, sampling)
        if (sampling.n or 1) > 1:
            raise RequestError(
                f"{self!r} generates one output per call, and n is {sampling.n}; fork the state instead", param="n"
            )
        messages = messages_of(conversation)
        given = settings(sampling, {**_NAMES, "n": "n"}, repr(self))
        body: dict[str, Any] = {name: given[name] for name in _TYPED if name in given}
        body["extra_body"] = {name: given[name] for name in _SAMPLING if given.get(name, 1.0) != 1.0}
        body |= {
            "model": self.model_name,
            "messages": [message_body(m, _picture) for m in messages if m.role != "system"],
        }
        if sampling.constraint is not None:
            body["output_config"] = {"format": {"type": "json_schema", "schema": json.loads(sampling.constraint[1])}}
        if system := "\n\n".join(m.text for m in messages if m.role == "system"):
            body["system"] = system
        with translated_errors(self._package, repr(self)):
            if on_text is None:
                answer = self._client.messages.create(**body)
            else:
                with self._client.messages.stream(**body) as stream:
                    for piece in stream.text_stream:
                        on_text(piece)
                    answer = stream.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
        return [Generated(text, _meta(answer))]

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def _picture(kind: str, data: str) -> dict[str, Any]:
    source = {"type": "url", "url": data} if kind == "url" else {"type": "base64", "media_type": kind, "data": data}
    return {"type": "image", "source": source}


def _meta(answer: Any) -> dict[str, Any]:
    usage = answer.usage
    cached = usage.cache_read_input_tokens or 0
    return {
        "finish_reason": {"type": answer.stop_reason},
        "prompt_tokens": usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0),
        "completion_tokens": usage.output_tokens,
        "cached_tokens": cached,
    }

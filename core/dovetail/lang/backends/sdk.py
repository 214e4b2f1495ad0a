"""Provide what the backends of OpenAI's and Anthropic's official clients share: imports, errors, and pictures."""

from __future__ import annotations

import base64
import contextlib
import importlib
import mimetypes
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from dovetail.errors import EngineError, RequestError
from dovetail.lang.backends.answers import refusal
from dovetail.lang.conversation import Conversation, Message
from dovetail.lang.ir import Image, SamplingOptions

_NEUTRAL = {
    "min_tokens": 0,
    "stop_token_ids": (),
    "top_k": -1,
    "min_p": 0.0,
    "ignore_eos": False,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "top_p": 1.0,
    "return_logprob": False,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
}
"""The values with which a setting has no effect."""


def client_package(name: str) -> Any:
    """Import the official client. Raises ``ImportError`` that contains the install command."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"this backend needs the package {name}: pip install 'dovetail[{name}]'") from error


@contextlib.contextmanager
def translated_errors(package: Any, where: str) -> Iterator[None]:
    """Raise failures of the official client as errors of Dovetail."""
    try:
        yield
    except package.APIStatusError as error:
        status = error.status_code
        raise refusal(status, f"{where} answered {status}: {error.message}") from error
    except package.APIError as error:
        raise EngineError(f"{where} did not answer: {type(error).__name__}: {error}") from error
    except RuntimeError as error:  # the client was closed
        raise EngineError(f"{where}: {error}; make a new backend") from error


def settings(sampling: SamplingOptions, names: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the values that ``sampling`` sets, under an API's own names.

    Raises ``RequestError`` for a setting that the API does not have, unless its value has no effect.
    """
    given = {name: value for name, value in sampling.given().items() if _NEUTRAL.get(name) != value}
    given.pop("constraint", None)
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        raise RequestError(f"{where} has no {', '.join(unknown)}; leave it out", param=unknown[0])
    return {names[name]: list(v) if isinstance(v, tuple) else v for name, v in given.items()}


def messages_of(conversation: Conversation) -> list[Message]:
    """Return the messages to send; a prompt that is only text outside of messages becomes a user message.

    Raises ``RequestError`` for a prompt with both.
    """
    messages = list(conversation.all_messages)
    if messages and conversation.before:
        raise RequestError(
            f"{conversation.before!r:.60} is outside of messages, but a chat API accepts only messages; put it into one"
        )
    if messages and messages[-1].role == "assistant" and not messages[-1].parts:
        messages.pop()  # the message to generate
    if not messages:
        parts = (*conversation.pictures, conversation.before)
        messages = [Message("user", tuple(part for part in parts if part))]
    if not any(message.parts for message in messages):
        raise RequestError("the prompt is empty; append text before the first gen(...)", param="prompt")
    return messages


def message_body(message: Message, picture: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """Return a message in the form that both APIs have.

    ``picture`` makes a part of the message from a picture's media type and base64 data, or from ``url`` and its
    address. Raises ``RequestError``.
    """
    if not message.images:
        return {"role": message.role, "content": message.text}
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else picture(*_loaded(part)) for part in message.parts
    ]
    return {"role": message.role, "content": content}


def _loaded(image: Image) -> tuple[str, str]:
    source = image.source
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return "url", source
    if isinstance(source, str) and source.startswith("data:"):
        kind, _, data = source[5:].partition(";base64,")
        return kind, data
    return (_kind(source), base64.b64encode(source).decode()) if isinstance(source, bytes) else _read(source)


def _read(path: str | os.PathLike[str]) -> tuple[str, str]:
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RequestError(f"image({os.fspath(path)!r:.120}) cannot be read: {error}") from error
    return mimetypes.guess_type(os.fspath(path))[0] or _kind(data), base64.b64encode(data).decode()


def _kind(data: bytes) -> str:
    marks = {b"\x89PNG": "image/png", b"\xff\xd8": "image/jpeg", b"GIF8": "image/gif", b"RIFF": "image/webp"}
    found = next((kind for mark, kind in marks.items() if data.startswith(mark)), None)
    if found is None:
        raise RequestError("image(...) has bytes of an unknown format; allowed: PNG, JPEG, GIF, WebP")
    return found

"""Hold the text of a state: messages that the model's chat template renders, and text outside of any message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dovetail.errors import RequestError
from dovetail.lang.ir import Image

Template = Callable[[Sequence[dict[str, Any]], bool], str]
"""Renders messages (``role``, ``content``); if the second argument is true, the assistant's turn is opened."""

_END = "\ue0d0\ue0d1\ue0d2"  # marks the end of a message that has not ended; it occurs in no text
_PICTURE = "<image>"


@dataclass(frozen=True, slots=True)
class Message:
    """Hold one message. ``parts`` are its texts and pictures in order; adjacent texts are joined."""

    role: str
    parts: tuple[str | Image, ...] = ()

    def plus(self, part: str | Image) -> Message:
        """Return the message with one more part."""
        if isinstance(part, str) and self.parts and isinstance(self.parts[-1], str):
            return replace(self, parts=(*self.parts[:-1], self.parts[-1] + part))
        return replace(self, parts=(*self.parts, part)) if part != "" else self

    @property
    def text(self) -> str:
        """Return the text of the message, in which a mark stands for each picture."""
        return "".join(part if isinstance(part, str) else _PICTURE for part in self.parts)

    @property
    def images(self) -> tuple[Image, ...]:
        """Return the pictures of the message."""
        return tuple(part for part in self.parts if isinstance(part, Image))

    def shown(self) -> dict[str, Any]:
        """Return the message as a mapping with ``role`` and ``content``: text, or a list of typed parts if there are
        pictures."""
        if not self.images:
            return {"role": self.role, "content": self.text}
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part.source}
            for part in self.parts
        ]
        return {"role": self.role, "content": content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the messages that have ended, the message that is still open, and the text outside of messages. A conversation
    is immutable.

    ``before`` is the text that ends where ``messages[start:]`` begin; messages before ``start`` are already rendered in
    it.
    """

    messages: tuple[Message, ...] = ()
    open: Message | None = None
    before: str = ""
    start: int = 0
    pictures: tuple[Image, ...] = field(default=())  # outside of messages

    def begin(self, role: str) -> Conversation:
        """Return the conversation with a new open message. Raises ``RequestError`` if a message is open."""
        if self.open is not None:
            raise RequestError(
                f"a message of the role {role} begins inside of {self.open.role}; end that message first"
            )
        return replace(self, open=Message(role))

    def end(self, role: str) -> Conversation:
        """Return the conversation with the open message ended. Raises ``RequestError`` if no message of this role is
        open."""
        if self.open is None or self.open.role != role:
            raise RequestError(
                f"a message of the role {role} ends, but {self.open.role if self.open else 'no message'} had begun"
            )
        return replace(self, open=None, messages=(*self.messages, self.open))

    def plus(self, part: str | Image, template: Callable[[], Template]) -> Conversation:
        """Return the conversation with one more part, in the open message or outside of messages."""
        if self.open is not None:
            return replace(self, open=self.open.plus(part))
        if isinstance(part, Image):
            return replace(self, before=self.before + _PICTURE, pictures=(*self.pictures, part))
        if len(self.messages) > self.start:
            return replace(self, before=self.text(template()) + part, start=len(self.messages))
        return replace(self, before=self.before + part)

    @property
    def chat(self) -> bool:
        """Return whether there are messages, so that a chat template renders the text."""
        return bool(self.messages) or self.open is not None

    @property
    def all_messages(self) -> tuple[Message, ...]:
        """Return the messages, including the open message."""
        return self.messages if self.open is None else (*self.messages, self.open)

    @property
    def images(self) -> tuple[Image, ...]:
        """Return all pictures."""
        return self.pictures + tuple(image for message in self.all_messages for image in message.images)

    def text(self, template: Template) -> str:
        """Return the prompt. ``template`` raises ``RequestError`` if it rejects the conversation."""
        if not self.chat or (self.open is None and len(self.messages) == self.start):
            return self.before
        written = self._written(template)
        if not self.start:
            return self.before + written
        old = template([message.shown() for message in self.messages[: self.start]], False)
        if not written.startswith(old):
            raise RequestError(
                "there is text between messages that the model's chat template renders differently once other messages "
                "follow; put the text into a message"
            )
        return self.before + written[len(old) :]

    def _written(self, template: Template) -> str:
        closed, message = [m.shown() for m in self.messages], self.open
        if message is None:
            return template(closed, False)
        if message.role == "assistant":
            return template(closed, True) + message.text
        written = template([*closed, {"role": message.role, "content": message.text + _END}], False)
        return written[: written.rindex(_END)]

    def since(self, earlier: Conversation) -> tuple[tuple[Message, ...], str]:
        """Return (messages, text), what was added to the conversation ``earlier``, from which this one was made. If a message
        began since then, the messages that began are returned, and otherwise the text that was appended."""
        count = len(earlier.messages)
        if len(self.messages) > count or (self.open is None) != (earlier.open is None):
            if earlier.open is not None:
                raise RequestError("a fork ended a message that began before the fork; call join inside of the message")
            return self.all_messages[count:], ""
        new, old = (self.open, earlier.open) if self.open and earlier.open else (None, None)
        return (), new.text[len(old.text) :] if new and old else self.before[len(earlier.before) :]


def labelled(messages: Sequence[dict[str, Any]], opened: bool) -> str:
    """Render a conversation whose real template is unknown, for display."""
    lines = [f"{message['role'].upper()}: {message['content']}\n" for message in messages]
    return "".join(lines) + ("ASSISTANT: " if opened else "")

"""Provide the base class of readers of tool calls. It handles content, calls that are emitted in parts, and whitespace
around calls."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from dovetail.interfaces.parsers import CallDelta, Tool, ToolDelta, ToolStream
from dovetail_parsers.reader import END, MalformedError, Reading, TextReader


class CallReader(TextReader, ToolStream):
    """Implement a tool stream on top of ``read``.

    If a call turns out to be malformed before any part of it was emitted, all of it is content. If parts were emitted,
    the call ends where it is malformed, and the rest is content.
    """

    def __init__(self, tools: Sequence[Tool], new_id: Callable[[], str]) -> None:
        self.names = frozenset(tool.name for tool in tools)
        self._new_id = new_id
        self._index = -1
        self._content: list[str] = []
        self._deltas: list[CallDelta] = []
        self._spaces = ""  # whitespace after content or a call, emitted once content follows
        self._after_call = False
        self.call_begun = False
        super().__init__()

    def feed(self, text: str) -> ToolDelta:
        """See ``ToolStream``."""
        self.push(text)
        return self._take()

    def finish(self) -> ToolDelta:
        """See ``ToolStream``."""
        self.end()
        if not self._after_call:
            self._content.append(self._spaces)
        return self._take()

    def _take(self) -> ToolDelta:
        content, calls = "".join(self._content), tuple(_joined(self._deltas))
        self._content.clear()
        self._deltas.clear()
        return ToolDelta(content, calls)

    def add_content(self, text: str) -> None:
        """Emit ``text`` as content. Whitespace at its end is held back until it is known what follows."""
        bare = text.rstrip(" \t\r\n")
        if bare:
            self._content += (self._spaces, bare)
            self._spaces, self._after_call = "", False
        self._spaces += text[len(bare) :]

    def begin_call(self, name: str) -> None:
        """Emit the beginning of a call of function ``name``."""
        self.accept()
        self._index += 1
        self._spaces, self._after_call, self.call_begun = "", True, True
        self._deltas.append(CallDelta(self._index, self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Emit the next characters of the call's arguments."""
        self.accept()
        self._deltas.append(CallDelta(self._index, arguments=text))

    def content_until(self, *marks: str) -> Reading[str]:
        """Emit content up to the first of ``marks``, and return that mark; return "" at the end of the text. The
        characters of the mark stay kept."""
        return (yield from self.copy_until(self.add_content, *marks))

    def attempt(self, call: Reading[None]) -> Reading[bool]:
        """Read a call whose first characters are kept, and return True if it is a well-formed call. If it is malformed
        after a part of it was emitted, the other characters are read again as content. If it is malformed before that,
        its first character becomes content, and the characters after that are read again."""
        self.call_begun = False
        try:
            yield from call
        except MalformedError:
            if self.call_begun:
                self.give_back()
            else:
                self.add_content(self.first_of_kept())
            return False
        self.accept()
        return True

    def close(self, *parts: str | Collection[str]) -> Reading[None]:
        """Read the marks that end a call, and skip whitespace before each. If the text ends before that, or continues
        in another way, the call remains valid and the characters that were read for a mark are given back."""
        for part in parts:
            self.accept()
            char = yield from self.space()
            if char == END:
                self.accept()
                return
            self.unread()
            yield from self.expect(part) if isinstance(part, str) else self.one_of(part)
        self.accept()


def _joined(calls: Sequence[CallDelta]) -> list[CallDelta]:
    """Return ``calls`` with the deltas of each call joined into one."""
    joined: list[CallDelta] = []
    for delta in calls:
        if joined and delta.id is None and joined[-1].index == delta.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + delta.arguments)
        else:
            joined.append(delta)
    return joined

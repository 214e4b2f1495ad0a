"""Read JSON (RFC 8259) one character at a time, and calls that are JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Literal

from dovetail_parsers.calls import CallReader
from dovetail_parsers.reader import SPACE, MalformedError, Reading, TextReader

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_IN_NUMBER = frozenset("0123456789+-.eE")
_WORDS = ("true", "false", "null")
_HEX = frozenset("0123456789abcdefABCDEF")

State = Literal[
    "value", "first value", "key", "first key", "colon", "comma", "string", "escape", "hex", "number", "word"
]


class ObjectScanner:
    """Scan one JSON object, beginning with its ``{``."""

    def __init__(self) -> None:
        self._open: list[str] = []  # brackets, outermost first
        self._state: State = "value"
        self._token = ""  # the number or word so far, or the hexadecimal digits
        self._is_key = False

    def push(self, char: str) -> bool:
        """Read a character, and return True if the object ends with it. Raises ``MalformedError``."""
        if self._state == "number":
            if char in _IN_NUMBER:
                self._token += char
                return False
            if not _NUMBER.fullmatch(self._token):
                raise MalformedError(f"{self._token!r} is not a number")
            self._state = "comma"
        if self._state in ("string", "escape", "hex"):
            self._in_string(char)
        elif self._state == "word":
            self._in_word(char)
        elif char not in SPACE or not self._open:
            self._between(char)
        return not self._open

    def _between(self, char: str) -> None:
        state = self._state
        if state in ("value", "first value") and not (char == "]" and state == "first value"):
            self._begin(char)
        elif state in ("key", "first key") and char == '"':
            self._state, self._is_key = "string", True
        elif state == "colon" and char == ":":
            self._state = "value"
        elif state == "comma" and char == ",":
            self._state = "key" if self._open[-1] == "{" else "value"
        elif state in ("comma", "first key", "first value") and self._open[-1] + char in ("{}", "[]"):
            self._open.pop()
            self._state = "comma"
        else:
            raise MalformedError(f"{char!r} where JSON has a {state}")

    def _begin(self, char: str) -> None:
        """Begin a value with ``char``; the outermost value must be an object."""
        if char == "{" or (char == "[" and self._open):
            self._open.append(char)
            self._state = "first key" if char == "{" else "first value"
        elif char == '"' and self._open:
            self._state, self._is_key = "string", False
        elif self._open and (char in "-0123456789" or char in "tfn"):
            self._state, self._token = "word" if char in "tfn" else "number", char
        else:
            raise MalformedError(f"{char!r} where JSON has a value")

    def _in_string(self, char: str) -> None:
        if self._state == "hex":
            self._token += char
            if char not in _HEX:
                raise MalformedError(f"{char!r} is not a hexadecimal digit")
            if len(self._token) == 4:
                self._state = "string"
        elif self._state == "escape":
            if char not in '"\\/bfnrtu':
                raise MalformedError(f"\\{char} is not an escape of JSON")
            self._state, self._token = "hex" if char == "u" else "string", ""
        elif char == "\\":
            self._state = "escape"
        elif char == '"':
            self._state = "colon" if self._is_key else "comma"
        elif char < " ":
            raise MalformedError(f"a JSON string has the control character {char!r}")

    def _in_word(self, char: str) -> None:
        self._token += char
        if self._token in _WORDS:
            self._state = "comma"
        elif not any(word.startswith(self._token) for word in _WORDS):
            raise MalformedError(f"{self._token!r} where JSON has a value")


def json_object(reader: TextReader, emit: Callable[[str], None]) -> Reading[None]:
    """Read an object, whose ``{`` is the next character, and emit each character once it is read."""
    scanner = ObjectScanner()
    while True:
        char = yield from reader.next()
        if not char:
            raise MalformedError("the text ends in an object")
        try:
            done = scanner.push(char)
        except MalformedError:
            reader.unread()
            raise
        emit(char)
        if done:
            return


def json_string(reader: TextReader) -> Reading[str]:
    """Read the rest of a string after its opening quote, and return its value."""
    text = '"'
    escaped = False
    while True:
        char = yield from reader.next()
        if not char or char < " ":
            raise MalformedError("a string does not end")
        text += char
        if char == '"' and not escaped:
            break
        escaped = char == "\\" and not escaped
    try:
        return json.loads(text)
    except ValueError as error:
        raise MalformedError(str(error)) from error


def json_call(reader: CallReader) -> Reading[None]:
    """Read a call ``{"name": ..., "arguments": {...}}``, whose ``{`` has been read, and emit it.

    The keys may come in any order, each once. ``parameters`` is accepted in place of ``arguments``. If there is
    neither, the arguments are an empty object.
    """
    name: str | None = None
    arguments: list[str] | None = None  # the arguments that came before the name; None if none have come
    while True:
        yield from reader.skip_space()
        yield from reader.one_of('"')
        key = yield from json_string(reader)
        yield from _colon(reader)
        if key == "name" and name is None:
            yield from reader.one_of('"')
            name = yield from json_string(reader)
            _check_name(reader, name)
            if arguments is not None:
                _whole_call(reader, name, "".join(arguments))
        elif key in ("arguments", "parameters") and arguments is None:
            arguments = []
            yield from _arguments(reader, name, arguments)
        else:
            raise MalformedError(f"a call has no {key!r} here")
        yield from reader.skip_space()
        if (yield from reader.one_of(",}")) == "}":
            break
    if name is None:
        raise MalformedError("a call without a name")
    if arguments is None:
        _whole_call(reader, name, "{}")


def _colon(reader: CallReader) -> Reading[None]:
    yield from reader.skip_space()
    yield from reader.one_of(":")
    yield from reader.skip_space()


def _check_name(reader: CallReader, name: str) -> None:
    if name not in reader.names:
        raise MalformedError(f"there is no function {name!r}")


def _arguments(reader: CallReader, name: str | None, kept: list[str]) -> Reading[None]:
    """Read the arguments. Emit them if the name is known, else append them to ``kept``."""
    if (yield from reader.peek()) != "{":
        raise MalformedError("arguments are an object")
    if name is not None:
        reader.begin_call(name)
        yield from json_object(reader, reader.add_arguments)
    else:
        yield from json_object(reader, kept.append)


def _whole_call(reader: CallReader, name: str, arguments: str) -> None:
    reader.begin_call(name)
    reader.add_arguments(arguments)


def read_arguments(reader: CallReader, name: str) -> Reading[None]:
    """Emit a call of ``name``, and read and emit its arguments, which come next."""
    if (yield from reader.peek()) != "{":
        raise MalformedError("arguments are an object")
    reader.begin_call(name)
    yield from json_object(reader, reader.add_arguments)

"""Run a conversation with a user at a terminal: turns, and the commands that begin with a slash."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.cli.chat_backends import SAMPLING, ChatAnswer, ChatBackend, ChatSettings, Message
from dovetail.cli.chat_view import ChatView
from dovetail.errors import ConfigError, DovetailError
from dovetail.sampling_params import GrammarKind, GrammarSpec, SamplingParams


class ChatSession:
    """Hold one conversation. ``handle`` processes an input of the user, which is a turn or a command; ``read_line``
    reads a further line."""

    def __init__(
        self,
        backend: ChatBackend,
        settings: ChatSettings,
        system: str | None,
        view: ChatView,
        read_line: Callable[[str], str],
    ) -> None:
        self.messages: list[Message] = []
        self.settings = settings
        self._backend = backend
        self._system = system
        self._view = view
        self._read_line = read_line
        self._last_turn: Sequence[Message] = ()
        self._defaults = settings.params
        self._commands: dict[str, Callable[[str], bool | None]] = {
            "help": self._help,
            "system": self._set_system,
            "set": self._set,
            "schema": self._schema,
            "tools": self._tools,
            "retry": self._retry,
            "clear": self._clear,
            "save": self._save,
            "plugins": self._plugins,
            "quit": self._quit,
        }

    def handle(self, text: str) -> bool:
        """Process an input. Returns False if the conversation is over. Errors are shown, and the conversation is
        kept."""
        try:
            if not text.startswith("/"):
                self._turn([{"role": "user", "content": text}])
                return True
            if text.startswith("//"):
                self._turn([{"role": "user", "content": text[1:]}])
                return True
            name, _, rest = text[1:].partition(" ")
            if name not in self._commands:
                raise ConfigError(
                    f"there is no /{name}; /help lists the commands, and //{name} sends /{name} to the model"
                )
            return self._commands[name](rest.strip()) is not False
        except (DovetailError, OSError, UnicodeError) as error:
            self._view.error(error)
        return True

    def _turn(self, added: Sequence[Message]) -> None:
        """Send ``added`` and show the answer. The messages are kept only if there is an answer; /retry sends them
        again in any case."""
        self._last_turn = added
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        answer, stopped = ChatAnswer(), False
        try:
            pieces = self._backend.answer([*system, *self.messages, *added], self.settings, answer)
            with closing(pieces):
                for piece in pieces:
                    self._view.piece(*piece)
        except KeyboardInterrupt:
            stopped = True
            answer.calls.clear()  # they may be incomplete
        self._view.end(answer, stopped)
        if answer.content or answer.calls:
            self.messages += [*added, answer.message]
        if answer.calls:
            self._results(answer.calls)

    def _results(self, calls: Sequence[dict[str, Any]]) -> None:
        """Read the results of the called functions from the user and send them. An empty result for one function
        sends nothing."""
        results: list[Message] = []
        for call in calls:
            content = self._read_line(f"what {call['function']['name']} returns: ")
            if not content:
                return
            results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        self._turn(results)

    def _help(self, rest: str) -> None:
        """list the commands of this program"""
        rows = [(f"/{name}{_USAGE.get(name, '')}", command.__doc__ or "") for name, command in self._commands.items()]
        width = max(len(left) for left, _ in rows) + 2
        for left, right in rows:
            self._view.note(f"{left:{width}}{right}")
        self._view.note("Ctrl-C stops an answer, Ctrl-D ends the conversation; //word sends /word to the model")

    def _set_system(self, rest: str) -> None:
        """set the system message from now on; without text, remove it"""
        self._system = rest or None
        self._view.note("there is a system message now" if rest else "there is no system message now")

    def _set(self, rest: str) -> None:
        """change how answers are sampled; without a value, restore the initial value; alone, show the settings"""
        params = self.settings.params
        if _ASSIGNMENT.sub("", rest).strip():
            raise ConfigError(
                f'/set {rest}: give name=value, several separated by spaces, as in /set temperature=0.7 stop=["\\n"]'
            )
        for name, text in _ASSIGNMENT.findall(rest):
            params = self._changed(params, name, text)
        self.settings = replace(self.settings, params=params)
        self._view.note("  ".join(f"{name}={json.dumps(getattr(params, name))}" for name in SAMPLING))

    def _changed(self, params: SamplingParams, name: str, text: str) -> SamplingParams:
        name = {"max_tokens": "max_new_tokens"}.get(name, name)
        if name not in SAMPLING:
            raise ConfigError(f"/set {name}: there is no such setting; allowed: {', '.join(SAMPLING)}")
        if not text:
            return replace(params, **{name: getattr(self._defaults, name)})
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if name == "stop":
            value = tuple(value) if isinstance(value, list) else (str(value),)
        return replace(params, **{name: value})

    def _schema(self, rest: str) -> None:
        """make answers follow a JSON schema, from a file or written out"""
        grammar = None
        if rest and rest != "off":
            text = rest if rest.startswith("{") else Path(rest).expanduser().read_text(encoding="utf-8")
            grammar = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(_json(text, dict, "a schema is a JSON object")))
        self.settings = replace(self.settings, params=replace(self.settings.params, grammar=grammar))
        self._view.note("answers follow the schema now" if grammar else "answers are unconstrained now")

    def _tools(self, rest: str) -> None:
        """set the functions that the model may call, from a file with a JSON array"""
        tools: list[Any] = []
        if rest and rest != "off":
            text = rest if rest.startswith("[") else Path(rest).expanduser().read_text(encoding="utf-8")
            tools = _json(text, list, "tools are a JSON array")
        self.settings = replace(self.settings, tools=tuple(tools))
        self._view.note(f"the model may call {len(tools)} functions now")

    def _retry(self, rest: str) -> None:
        """answer the last turn again"""
        if not self._last_turn:
            raise ConfigError("/retry: there is no turn yet")
        size = len(self._last_turn) + 1
        if self.messages[-size:-1] == list(self._last_turn):
            del self.messages[-size:]
        self._turn(self._last_turn)

    def _clear(self, rest: str) -> None:
        """begin a new conversation with the same settings"""
        self.messages, self._last_turn = [], ()
        self._view.note("a new conversation")

    def _save(self, rest: str) -> None:
        """write the conversation to a file: JSON, messages in OpenAI's form"""
        if not rest:
            raise ConfigError("/save needs a file, as in /save talk.json")
        system = [{"role": "system", "content": self._system}] if self._system else []
        text = json.dumps([*system, *self.messages], indent=2, ensure_ascii=False)
        Path(rest).expanduser().write_text(text + "\n", encoding="utf-8")
        self._view.note(f"{len(self.messages)} messages are in {rest}")

    def _plugins(self, rest: str) -> None:
        """show the components that were chosen, and why"""
        self._view.parts(self._backend.resolved())

    def _quit(self, rest: str) -> bool:
        """end the conversation"""
        return False


_USAGE = {
    "system": " TEXT",
    "set": " temperature=0.7 ...",
    "schema": " FILE | {...} | off",
    "tools": " FILE | [...] | off",
    "save": " FILE",
}
_ASSIGNMENT = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\[[^]]*\]|\S*)')


def _json(text: str, kind: type, otherwise: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"this is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise ConfigError(f"{text[:80]!r}: {otherwise}")
    return value

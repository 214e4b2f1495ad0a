"""Define ``dovetail chat``: a conversation in the terminal with a model in this process or on a running server."""

from __future__ import annotations

import select
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.engine_flags import check_no_config
from dovetail.cli.generate import MaxNewTokens, Seed, Temperature
from dovetail.cli.sources import FileOptions, Model, Sets, Tp, load, shortcuts

if TYPE_CHECKING:
    from dovetail.cli.chat_backends import ChatBackend, Message
    from dovetail.sampling_params import SamplingParams

Url = Annotated[
    str | None,
    typer.Option(help="Use the model of this server instead, as in http://127.0.0.1:30000, with or without /v1."),
]
Key = Annotated[
    str | None, typer.Option(envvar="DOVETAIL_API_KEY", show_envvar=True, help="The API key that the server requires.")
]

PASTE_SECONDS = 0.03
"""Lines that follow one another within this number of seconds were pasted, and form one message."""


def chat(
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    tp: Tp = None,
    url: Url = None,
    key: Key = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
) -> None:
    """Chat with a model: in this process, or with --url on a server. At a terminal, /help lists the commands of this
    program, and figures are shown below each answer. With piped input, each line is one turn, and an empty line ends
    the conversation."""
    from dovetail.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    backend = _remote(url, key, files, sets, model or tp) if url else _local(files, sets, model, tp)
    try:
        if sys.stdin.isatty():
            _run_interactive(backend, params, system)
        else:
            _run_piped(backend, params, system)
    finally:
        backend.close()


def _local(files: FileOptions, sets: Sets, model: Model, tp: Tp) -> ChatBackend:
    config, _ = load(files, [*(sets or ()), *shortcuts({"model.path": model, "parallel.tp": tp})])
    from dovetail.cli.chat_backends import LocalChatBackend
    from dovetail.llm import LLM

    return LocalChatBackend(LLM(config), config.model.name)


def _remote(url: str, key: str | None, files: FileOptions, sets: Sets, others: object) -> ChatBackend:
    check_no_config("--url", sets, files, others)
    from dovetail.cli.chat_backends import RemoteChatBackend

    return RemoteChatBackend(url, key)


def _run_piped(backend: ChatBackend, params: SamplingParams, system: str | None) -> None:
    """Read turns from standard input and write answers to standard output."""
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for line in iter(lambda: sys.stdin.readline().strip(), ""):
        messages.append({"role": "user", "content": line})
        parts: list[str] = []
        for text in backend.plain(messages, params):
            typer.echo(text, nl=False)
            parts.append(text)
        typer.echo()
        messages.append({"role": "assistant", "content": "".join(parts)})


def _run_interactive(backend: ChatBackend, params: SamplingParams, system: str | None) -> None:
    """Run a conversation with a user at the terminal."""
    from dovetail.cli.chat_backends import ChatSettings
    from dovetail.cli.chat_session import ChatSession
    from dovetail.cli.chat_view import ChatView

    view = ChatView()
    view.note(f"chatting with {backend.name}; /help lists commands, Ctrl-D ends")
    session = ChatSession(backend, ChatSettings(params), system, view, input)
    for text in _inputs(view.note):
        if not session.handle(text):
            return


def _inputs(note: Callable[[str], None]) -> Iterator[str]:
    """Yield what the user writes until Ctrl-D. Arrow keys edit and recall earlier inputs; a pasted text is one
    input."""
    try:
        import readline
    except ImportError:  # some platforms do not have it
        pass
    else:
        readline.parse_and_bind("set enable-bracketed-paste on")
    while True:
        try:
            text = _input()
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            note("\nCtrl-D or /quit ends the conversation")
            continue
        if text.strip():
            yield text


def _input() -> str:
    lines = [input("> ")]
    while sys.platform != "win32" and select.select([sys.stdin], [], [], PASTE_SECONDS)[0]:
        try:
            lines.append(input())
        except EOFError:
            break
    return "\n".join(lines)

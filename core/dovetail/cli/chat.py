"""``dovetail chat``: a conversation in the terminal, without a server."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.generate import MaxNewTokens, Seed, Temperature
from dovetail.cli.sources import FileOptions, Model, Sets, load, shortcuts

if TYPE_CHECKING:
    from dovetail.llm import LLM
    from dovetail.types import SamplingParams


def chat(
    files: FileOptions = None,
    sets: Sets = None,
    model: Model = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
) -> None:
    """Talk with the model, offline. One line is one turn; an empty line or Ctrl-D ends it."""
    config, _ = load(files, [*(sets or ()), *shortcuts({"model.path": model})])
    from dovetail.llm import LLM
    from dovetail.types import SamplingParams

    params = SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)
    messages = [{"role": "system", "content": system}] if system else []
    llm = LLM(config)
    try:
        for line in _lines():
            messages.append({"role": "user", "content": line})
            messages.append({"role": "assistant", "content": _answer(llm, messages, params)})
    finally:
        llm.close()


def _lines() -> Iterator[str]:
    """What the user writes, with a prompt if someone sits at the terminal."""
    while True:
        if sys.stdin.isatty():
            typer.secho("> ", fg="cyan", nl=False)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str:
    """Stream one answer to the terminal; returns its whole text."""
    parts = []
    for text in llm.stream_chat(messages, params):
        typer.echo(text, nl=False)
        parts.append(text)
    typer.echo()
    return "".join(parts)

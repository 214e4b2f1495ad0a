"""Show a conversation in a terminal."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from dovetail.cli.tables import add, table

if TYPE_CHECKING:
    from dovetail.cli.chat_backends import ChatAnswer

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def safe(text: str) -> str:
    """Return the text with its control characters made visible, so that no answer can move the cursor or rename the
    window."""
    return _CONTROL.sub(
        lambda found: chr(0x2400 + ord(found[0])) if ord(found[0]) < 0x20 else "\N{REPLACEMENT CHARACTER}", text
    )


class ChatView:
    """Show answers, errors and notes between two inputs of the user."""

    def __init__(self) -> None:
        self.out = Console(highlight=False)
        self._style: str | None = None

    def piece(self, reasoning: str, content: str) -> None:
        """Show a piece of an answer as it arrives; reasoning is dim. Ctrl-C takes effect after the piece."""
        if reasoning:
            self._write(reasoning, "dim italic")
        if content:
            if self._style == "dim italic":
                self._write("\n\n", "")
                content = content.lstrip("\n")
            self._write(content, "")

    def end(self, answer: ChatAnswer, stopped: bool) -> None:
        """Show the tool calls and figures below an answer. Ctrl-C has no effect meanwhile: the answer is over."""
        with _uninterrupted():
            self.out.print()
            for call in answer.calls:
                function = call["function"]
                self.out.print(Text(f"calls {safe(function['name'])} {safe(function['arguments'])}", "yellow"))
            self.out.print(figures(answer, stopped), soft_wrap=True)
            self._style = None

    def error(self, error: object) -> None:
        """Show an error."""
        self.broken_off()
        self.out.print(Text.assemble(("error: ", "bold red"), (safe(str(error)), "red")), soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a message of the program itself."""
        self.out.print(Text(text, "dim"), soft_wrap=True)

    def broken_off(self) -> None:
        """End the line of an incomplete answer."""
        if self._style is not None:
            self.out.print()
        self._style = None

    def parts(self, resolved: Mapping[str, Any]) -> None:
        """Show what was chosen for each component of the engine, and why."""
        grid = table("part", "chosen", "why")
        for slot, name, why in _chosen(resolved):
            add(grid, slot, name, why)
        self.out.print(grid)
        self.note("dovetail explain also shows the components that were not chosen, and why")

    def _write(self, text: str, style: str) -> None:
        with _uninterrupted() as arrived:
            self._style = style
            self.out.print(Text(safe(text), style), end="", soft_wrap=True)
            self.out.file.flush()
        if arrived:
            raise KeyboardInterrupt


@contextmanager
def _uninterrupted() -> Iterator[list[int]]:
    """Collect the signals of Ctrl-C that arrive within the block, so that none interrupts it. An interrupted ``Console``
    may take itself to be within another ``print`` from then on, and show nothing more."""
    arrived: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: arrived.append(number))
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGINT, before)


def figures(answer: ChatAnswer, stopped: bool = False) -> Text:
    """Return one line with the prompt tokens, the cached ones among them, the output tokens, times, speed, and the
    finish reason."""
    line: list[tuple[str, str]] = []
    if answer.prompt is not None:
        line.append((f"{answer.prompt} prompt", "dim"))
    if answer.cached is not None:
        line.append((f"{answer.cached} cached", "green" if answer.cached else "dim"))
    if answer.output is not None:
        line.append((f"{answer.output} output", "dim"))
    if answer.first is not None:
        line.append((f"{_number(1000 * (answer.first - answer.begun))} ms to first token", "dim"))
    if answer.output and answer.first and answer.last and answer.output > 1 and answer.last > answer.first:
        line.append((f"{_number((answer.output - 1) / (answer.last - answer.first))} tokens/s", "dim"))
    if answer.drafts:
        line.append((f"{answer.drafts[0]} of {answer.drafts[1]} drafts accepted", "dim"))
    finish = "stopped by you" if stopped else f"finish {answer.finish}"
    line.append((finish, "yellow" if stopped or answer.finish == "length" else "dim"))
    return Text(" · ", "dim").join(Text(*part) for part in line)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _chosen(resolved: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if "resolutions" not in resolved:
        return [(slot, part["name"] if part else "none", "") for slot, part in resolved["chosen"].items()]
    return [(one["slot"], one["chosen"] or "none", _why(one)) for one in resolved["resolutions"]]


def _why(resolution: Mapping[str, Any]) -> str:
    rule = "by priority" if resolution["rule"] == "priority" else resolution["rule"]
    return "; ".join(filter(None, (rule, resolution["note"])))

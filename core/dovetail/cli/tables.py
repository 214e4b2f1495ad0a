"""Make the tables and styles of the terminal output. The module imports rich, so commands import it when they print."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

STATUS_STYLE = {
    "loaded": "green",
    "ready": "green",
    "blocked": "yellow",
    "missing": "red",
    "unusable": "yellow",
    "incompatible": "red",
    "duplicate": "red",
    "failed": "red",
    "low": "yellow",
    "unneeded": "dim",
}
VERDICT_STYLE = {
    "chosen": "bold green",
    "available": "green",
    "passed over": "dim",
    "rejected": "red",
    "none": "yellow",
}


def console() -> Console:
    """Return the standard output. Tables fit its width; piped, they take 120 columns unless COLUMNS sets another
    width."""
    terminal = Console(highlight=False)
    return terminal if terminal.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=120)


def styled(word: str, styles: Mapping[str, str]) -> Text:
    """Return a status or verdict in its colour."""
    return Text(word, styles[word])


def table(*columns: str) -> Table:
    """Return an empty table with a ruled head."""
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        grid.add_column(column, overflow="fold", no_wrap=index == 0)
    return grid


def add(grid: Table, *cells: str | Text) -> None:
    """Add a row whose texts are shown as they are: brackets in them are not markup."""
    grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def facts(title: str, rows: Mapping[str, str]) -> Table:
    """Return a table of two columns: a label, and its text as it is."""
    grid = Table(box=None, pad_edge=False, title=title, title_justify="left", title_style="bold", show_header=False)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column(overflow="fold")
    for key, text in rows.items():
        add(grid, key, text)
    return grid

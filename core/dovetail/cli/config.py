"""Show the config tree, its schema, its documentation and its hash: ``dovetail config``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dovetail.cli.serve import ServeCommand, Words, read_arguments, with_flags
from dovetail.cli.sources import Json, Sets, load_registry

if TYPE_CHECKING:
    from dovetail.config import Config

app = typer.Typer(help="Show the config, its JSON Schema, its documentation, its hash.", no_args_is_help=True)

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of the terminal.")]


def _show(words: Words = None, sets: Sets = None, as_json: Json = False, **given: Any) -> None:
    """Show the complete config with which `dovetail serve` would start for the same arguments, as YAML.

    The output can be used as a config file.
    """
    import yaml

    from dovetail.config import config_hash, dump

    config = _config(words, sets, given)
    if as_json:
        typer.echo(json.dumps(dump(config), indent=2))
        return
    typer.echo(f"# sha256 {config_hash(config)}")
    typer.echo(yaml.safe_dump(dump(config), sort_keys=False, width=100), nl=False)


def _hash(words: Words = None, sets: Sets = None, **given: Any) -> None:
    """Print a SHA-256 that is equal for equal configs. The arguments are those of `dovetail serve`."""
    from dovetail.config import config_hash

    typer.echo(config_hash(_config(words, sets, given)))


def _config(words: list[str] | None, sets: list[str] | None, given: dict[str, Any]) -> Config:
    return read_arguments(words or (), sets or (), given, dict(os.environ))[0]


app.command("show", cls=ServeCommand)(with_flags(_show))
app.command("hash", cls=ServeCommand)(with_flags(_hash))


@app.command()
def schema(sets: Sets = None, output: Output = None) -> None:
    """Print the JSON Schema of the config for editors, including the sections of the installed plugins."""
    from dovetail.config.schema import config_schema

    _write(json.dumps(config_schema(load_registry((), sets)), indent=2) + "\n", output)


@app.command()
def docs(sets: Sets = None, output: Output = None) -> None:
    """Print the documentation of every key as Markdown; docs/config.md is this output."""
    from dovetail.config.docs import config_docs

    _write(config_docs(load_registry((), sets)), output)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        typer.echo(text, nl=False)
    else:
        from dovetail.atomic_files import write_atomically

        write_atomically(output, text)

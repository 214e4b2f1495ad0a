"""Show the config tree, its schema, its documentation and its hash: ``dovetail config``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dovetail.cli.sources import Files, Json, Sets, load, load_registry

app = typer.Typer(help="Show the config, its JSON Schema, its documentation, its hash.", no_args_is_help=True)

Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead of the terminal.")]


@app.command()
def show(files: Files = None, sets: Sets = None, as_json: Json = False) -> None:
    """Show the complete config that files, environment and --set give, as YAML. The output can be used as a config
    file."""
    import yaml

    from dovetail.config import config_hash, dump

    config, _ = load(files, sets)
    if as_json:
        typer.echo(json.dumps(dump(config), indent=2))
        return
    typer.echo(f"# sha256 {config_hash(config)}")
    typer.echo(yaml.safe_dump(dump(config), sort_keys=False, width=100), nl=False)


@app.command("hash")
def hash_(files: Files = None, sets: Sets = None) -> None:
    """Print a SHA-256 that is equal for equal configs."""
    from dovetail.config import config_hash

    typer.echo(config_hash(load(files, sets)[0]))


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

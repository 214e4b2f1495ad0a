"""Write the package of a new plugin: ``dovetail plugins new``."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer


def new(
    kind: Annotated[
        str,
        typer.Argument(
            help="attention, cache, grammar, speculative, policy, model, tool_parser, reasoning_parser, api, executor, "
            "logits_processor, quantization, experts, mixer, store, or the kind of an installed package."
        ),
    ],
    name: Annotated[str, typer.Argument(help="The name of the component in a config, as in page_tree.")],
    directory: Annotated[
        Path | None,
        typer.Option("--directory", "-d", help="Where to write it. [default: ./ and its distribution's name]"),
    ] = None,
    package: Annotated[
        str | None, typer.Option("--package", "-p", help="The package that is imported. [default: dovetail_NAME]")
    ] = None,
    author: Annotated[str | None, typer.Option("--author", help='For pyproject.toml: "Ada <ada@example.org>".')] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the installed component of this name.")] = False,
) -> None:
    """Write a complete, working package with one component of a kind: registration, settings, the component, its
    conformance test, a README and CI."""
    from dovetail.cli.sources import load_registry
    from dovetail.cli.tables import console
    from dovetail.scaffold import named, render, write

    names = named(load_registry(None, None), kind, name, package, replace=replace)
    folder = directory or Path(names.distribution)
    files = render(names, author)
    write(files, folder)
    console().print(f"{folder}: {len(files)} files, {names.kind} {names.name!r}. Next commands:", markup=False)
    for command in (("pip", "install", "-e", f"{folder}[dev]"), ("dovetail", "plugins", "check", str(folder))):
        console().print(f"  {shlex.join(command)}", markup=False, soft_wrap=True)

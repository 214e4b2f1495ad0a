"""Build the command tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from dovetail.cli import ab, bench, chat, config, doctor, explain, generate, keys, plugins, pull, quantize, serve
from dovetail.cli.engine_flags import EPILOG, EngineCommand


def build_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the app for these arguments. Plugins are loaded, for their commands, only if the arguments call no
    command of the core."""
    app = typer.Typer(
        name="dovetail",
        help="An LLM serving engine made of plugins.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
    )
    app.callback()(_root)
    app.command("serve", cls=serve.ServeCommand)(serve.serve)
    app.command("generate", cls=EngineCommand, epilog=EPILOG)(generate.generate)
    app.command("chat", cls=EngineCommand, epilog=EPILOG)(chat.chat)
    app.command("explain", cls=serve.ServeCommand)(explain.explain)
    app.command("doctor", cls=serve.ServeCommand)(doctor.doctor)
    app.command("quantize")(quantize.quantize)
    app.command("ab", cls=EngineCommand, epilog=EPILOG)(ab.ab)
    app.command("pull")(pull.pull)
    app.command("models")(pull.models)
    app.add_typer(bench.app, name="bench")
    app.add_typer(config.app, name="config")
    app.add_typer(keys.app, name="keys")
    app.add_typer(plugins.app, name="plugins")
    known = {entry.name for entry in (*app.registered_commands, *app.registered_groups)}
    if not known.intersection(arguments):
        _add_plugin_commands(app)
    return app


def _add_plugin_commands(app: typer.Typer) -> None:
    from dovetail.cli.sources import load_registry
    from dovetail.registry.candidates import call_hook

    call_hook(load_registry((), ()).hooks, "register_cli", app=app)


def _version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(version("dovetail"))
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show the traceback of an error as well.")] = False,
) -> None: ...

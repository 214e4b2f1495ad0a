"""Define ``dovetail bench``, the command group for measurements."""

from __future__ import annotations

import typer

from dovetail.cli import bench_load, bench_spec
from dovetail.cli.engine_flags import EPILOG, EngineCommand, ServerCommand

app = typer.Typer(help="Measure a server, or the engine on this machine.", no_args_is_help=True)
app.command("serve", cls=ServerCommand, epilog=EPILOG)(bench_load.serve)
app.command("offline", cls=EngineCommand, epilog=EPILOG)(bench_load.offline)
app.command("spec", cls=EngineCommand, epilog=EPILOG)(bench_spec.spec)

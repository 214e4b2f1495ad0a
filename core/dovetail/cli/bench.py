"""Define ``dovetail bench``, the command group for measurements."""

from __future__ import annotations

import typer

from dovetail.cli import bench_load, bench_spec

app = typer.Typer(help="Measure a server, or the engine on this machine.", no_args_is_help=True)
app.command("serve")(bench_load.serve)
app.command("offline")(bench_load.offline)
app.command("spec")(bench_spec.spec)

"""``dovetail bench``: measurements."""

from __future__ import annotations

import typer

from dovetail.cli import bench_spec

app = typer.Typer(help="Measure a server, or the engine on this machine.", no_args_is_help=True)
app.command("spec")(bench_spec.spec)


@app.callback()
def _group() -> None:
    """Without it, a group of one command would be that command."""

"""``dovetail serve``: the HTTP server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from dovetail.cli.sources import Files, Model, Sets, load, shortcuts

if TYPE_CHECKING:
    from dovetail.server.online import Row, Side


def serve(
    files: Files = None,
    sets: Sets = None,
    model: Model = None,
    host: Annotated[str | None, typer.Option(help="Short for --set server.host=...")] = None,
    port: Annotated[int | None, typer.Option(help="Short for --set server.port=...")] = None,
) -> None:
    """Serve a model over HTTP: its APIs, and a page to chat on at /. Exit status: 0 after a signal, 2 for a wrong setting, 1 if the engine
    cannot start, 70 if it has failed while serving."""
    import logging

    given = shortcuts({"model.path": model, "server.host": host, "server.port": port})
    config, registry = load(files, [*(sets or ()), *given])
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from dovetail.errors import EngineDeadError
    from dovetail.server.engine_process import EXIT_ENGINE_FAILED
    from dovetail.server.launch import serve as serve_http

    try:
        serve_http(config, registry, judge=_judge)
    except EngineDeadError as error:
        logging.getLogger("dovetail.server").error("%s", error)
        raise typer.Exit(EXIT_ENGINE_FAILED) from error


def _judge(control: Side, others: Sequence[Side]) -> list[Row]:
    """The comparison of an experiment's arms; its libraries are loaded when it is first asked for."""
    from dovetail.experiment.online import judge

    return judge(control, others)

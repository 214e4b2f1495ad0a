"""Run the HTTP server: ``dovetail serve``."""

from __future__ import annotations

from typing import Annotated

import typer

from dovetail.cli.sources import Files, Model, Sets, Tp, load, shortcuts


def serve(
    files: Files = None,
    sets: Sets = None,
    model: Model = None,
    tp: Tp = None,
    host: Annotated[str | None, typer.Option(help="Short for --set server.host=...")] = None,
    port: Annotated[int | None, typer.Option(help="Short for --set server.port=...")] = None,
) -> None:
    """Serve a model over HTTP: the APIs, and a chat page at /. Exit status: 0 after a signal, 2 for a wrong setting, 1 if the
    engine cannot start, 70 if the engine has failed while serving and was not started again."""
    import logging

    given = shortcuts({"model.path": model, "parallel.tp": tp, "server.host": host, "server.port": port})
    config, registry = load(files, [*(sets or ()), *given])
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from dovetail.errors import EngineDeadError
    from dovetail.server.engine_process import EXIT_ENGINE_FAILED
    from dovetail.server.launch import serve as serve_http
    from dovetail.server.parts import single_engine

    prepare = single_engine
    if config.experiment.arms:
        from dovetail.experiment.online.serving import prepare_experiment as prepare
    try:
        serve_http(config, registry, prepare=prepare)
    except EngineDeadError as error:
        logging.getLogger("dovetail.server").error("%s", error)
        raise typer.Exit(EXIT_ENGINE_FAILED) from error

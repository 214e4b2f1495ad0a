"""Define the parts of a server that its config does not hold (the engine and additions to the application), and the function that
prepares them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from dovetail.config import Config
from dovetail.errors import ConfigError
from dovetail.registry.installed import Registry
from dovetail.server.app import ServerRoute
from dovetail.server.engine_process import EngineTarget
from dovetail.server.engines import EngineHandle
from dovetail.server.supervisor import SupervisedEngine
from dovetail.tokenizer import Tokenizer


def _unchanged(app: ASGIApp) -> ASGIApp:
    return app


def _no_metrics(registry: CollectorRegistry) -> None:
    return None


class ServerParts(NamedTuple):
    """Hold the engine of a server and what is added to its application.

    ``routes`` replace routes of the server with the same path. ``wrap`` returns the application in further ASGI middleware.
    ``register_metrics`` adds collectors; it is called after the engine has started.
    """

    engine: EngineHandle
    routes: Sequence[ServerRoute] = ()
    wrap: Callable[[ASGIApp], ASGIApp] = _unchanged
    register_metrics: Callable[[CollectorRegistry], None] = _no_metrics


Prepare = Callable[[Config, Registry, EngineTarget, Tokenizer], Awaitable[ServerParts]]
"""A function that prepares the parts of a server; it does not start the engine. ``EngineTarget`` is what an engine process runs."""


async def single_engine(config: Config, registry: Registry, target: EngineTarget, tokenizer: Tokenizer) -> ServerParts:
    """Return the parts of a server with one engine process. Raises ``ConfigError`` for a config with an experiment."""
    if config.experiment.arms:
        raise ConfigError(
            "experiment.arms is set, but this server was started for one engine; pass "
            "prepare=dovetail.experiment.online.serving.prepare_experiment, or remove experiment"
        )
    return ServerParts(SupervisedEngine(config, target))

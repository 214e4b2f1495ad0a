"""Start a server from a config, run it and stop it cleanly."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from math import ceil
from types import FrameType

import uvicorn
from prometheus_client import Gauge
from starlette.types import ASGIApp

from dovetail.chat.parsing import load_parsers
from dovetail.config import Config
from dovetail.errors import ConfigError, EngineDeadError
from dovetail.generation.prompts import load_prompt_hooks
from dovetail.registry.api_choice import load_apis
from dovetail.registry.candidates import call_hook
from dovetail.registry.installed import Registry
from dovetail.registry.loader import load_plugins
from dovetail.server.app import build_app
from dovetail.server.connections import ConnectionGuard, raise_descriptors
from dovetail.server.engine_process import EngineTarget, run_engine
from dovetail.server.engines import EngineHandle
from dovetail.server.memory import defer_collections
from dovetail.server.metrics import Metrics
from dovetail.server.parts import Prepare, single_engine
from dovetail.server.protocol import bounded_protocol
from dovetail.server.service import Service, info_labels, package_version
from dovetail.server.tenants.tenancy import Tenancy
from dovetail.server.tracing import Tracing
from dovetail.templates.renderer import TemplateRenderer
from dovetail.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("dovetail.server")

_POLL_SECONDS = 0.05
_ABORT_SECONDS = 2.0
_RESPONSE_SECONDS = 5.0
_SWITCH_SECONDS = 0.001
"""The seconds after which the event loop gets its turn while threads parse large bodies and write large answers. Python's
default is 5 ms, which a request would wait several times."""


def serve(
    config: Config,
    registry: Registry | None = None,
    target: EngineTarget = run_engine,
    prepare: Prepare = single_engine,
) -> None:
    """Serve until SIGINT or SIGTERM, then drain and return. A second signal stops the server at once. Before the engine is ready,
    SIGTERM makes this function return, and SIGINT raises ``KeyboardInterrupt``. The hooks of ``registry`` may add metrics.
    ``target`` is what an engine process runs. ``prepare`` returns the engine and what is added to the application; a config with an experiment needs ``experiment.online.serving.prepare_experiment``. Raises ``ConfigError`` or
    ``EngineError`` if the server cannot start, and at the end ``EngineDeadError`` if the engine process has failed."""
    started = time.perf_counter()
    raise_descriptors()
    sys.setswitchinterval(_SWITCH_SECONDS)
    with _bind(config) as listener, asyncio.Runner(loop_factory=_loop_factory()) as runner:
        try:
            failure = runner.run(
                _serve(config, registry, target, prepare, listener, started, lambda _: defer_collections())
            )
        except asyncio.CancelledError:  # by _cancelled_by_signal
            return
    if failure is not None:
        raise EngineDeadError(f"the engine process had ended: {failure}")


@contextlib.contextmanager
def running_server(
    config: Config,
    registry: Registry | None = None,
    target: EngineTarget = run_engine,
    prepare: Prepare = single_engine,
) -> Iterator[str]:
    """Run a server in a thread of this process, for tests and tools. Yields its base URL. See ``serve``."""
    ready: list[DrainingServer] = []
    failed: list[BaseException] = []
    up = threading.Event()

    def announce(server: DrainingServer) -> None:
        ready.append(server)
        up.set()

    def work() -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(_serve(config, registry, target, prepare, listener, time.perf_counter(), announce))
        except BaseException as error:
            failed.append(error)
        finally:
            up.set()

    with _bind(config) as listener:
        thread = threading.Thread(target=work, name="dovetail-server", daemon=True)
        thread.start()
        up.wait()
        if failed:
            raise failed[0]
        try:
            yield url_of(listener)
        finally:
            ready[0].stop_soon()
            thread.join()
        if failed:
            raise failed[0]


class DrainingServer(uvicorn.Server):
    """Drain at the first signal: new requests are answered with 503, running ones may finish for ``server.drain_seconds``, and
    those that are left are aborted. Loads of adapters end at once, because no request could use the adapters. At the second
    signal the server exits at once. In every other respect it is a uvicorn server."""

    def __init__(self, config: uvicorn.Config, service: Service, on_started: Callable[[DrainingServer], None]) -> None:
        super().__init__(config)
        self._service = service
        self._on_started = on_started
        self._drain: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, start as uvicorn does, and report that the server is ready. Raises ``ConfigError`` if the port is in use."""
        self._event_loop = asyncio.get_running_loop()
        try:
            for listener in sockets or ():  # another process may have bound the port too; uvloop would not report it
                listener.listen(self.config.backlog)
        except OSError as error:
            section = self._service.config.server
            raise _cannot_listen(section.host, section.port, error) from error
        await super().startup(sockets)
        self._end = asyncio.ensure_future(self._end_with_engine())
        self._on_started(self)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._service.draining:
            self.force_exit = self.should_exit = True
        else:
            logger.info("%s: draining", signal.Signals(sig).name)
            self.stop_soon()

    def stop_soon(self) -> None:
        """Begin to drain. May be called from any thread."""
        self._service.draining = True
        self._event_loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        self._drain = self._drain or asyncio.ensure_future(self._drained())

    async def _end_with_engine(self) -> None:
        """Stop the server once there is no engine any more. Every request has been answered then."""
        await self._service.engine.ended()
        logger.error("the server ends, because the engine has ended: %s", self._service.engine.failure)
        self.stop_soon()

    async def _drained(self) -> None:
        engine, seconds = self._service.engine, self._service.config.server.drain_seconds
        with contextlib.suppress(EngineDeadError, TimeoutError):
            patience = _POLL_SECONDS if engine.stalled else _RESPONSE_SECONDS
            await asyncio.wait_for(self._service.served_adapters.end_loads(), patience)
        if self._service.paused:
            with contextlib.suppress(EngineDeadError, TimeoutError):
                await asyncio.wait_for(self._service.pause(False), _RESPONSE_SECONDS)
        await self._until_idle(seconds)
        if self._num_open and engine.alive:
            logger.warning("%d requests and loads of adapters were still open after %g s", self._num_open, seconds)
            engine.abort_all("the server is shutting down")
            await engine.end_if_hung(0.0 if engine.stalled else _RESPONSE_SECONDS)
            await self._until_idle(_ABORT_SECONDS)
        if self._service.templates is not None:
            self._service.templates.close()
        self.should_exit = True

    async def _until_idle(self, seconds: float) -> None:
        """Wait up to ``seconds`` until no request and no load of an adapter is open, but not for an engine that stands still."""
        engine, deadline = self._service.engine, time.monotonic() + seconds
        while self._num_open and not engine.stalled and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    @property
    def _num_open(self) -> int:
        return self._service.engine.num_open + self._service.served_adapters.num_loading


async def _serve(
    config: Config,
    registry: Registry | None,
    target: EngineTarget,
    prepare: Prepare,
    listener: socket.socket,
    started: float,
    announce: Callable[[DrainingServer], None] = lambda server: None,
) -> str | None:
    """Serve until the server is stopped. Return why the engine process has ended by itself, or None if it has not."""
    warn_of_any_proxy(config.server.trusted_proxies)
    tenancy = Tenancy(config.server, os.environ) if config.server.keys else None
    tracing = Tracing(config.tracing, package_version()) if config.tracing.endpoint else None
    tokenizer = load_tokenizer(config)
    templates = _started_renderer(config, tokenizer)
    plugins = registry or load_plugins(config.plugins)
    parts = await prepare(config, plugins, target, tokenizer)
    engine = parts.engine
    with _cancelled_by_signal():
        if templates is not None:
            await templates.check()
        await engine.start()
    try:
        parsers = load_parsers(engine.info, config, tokenizer, plugins)
        service = Service(config, engine, tokenizer, _metrics(config, engine, registry), parsers)
        service.templates = templates
        service.prompts = load_prompt_hooks(engine.info, config, plugins)
        if tenancy is not None:
            service.tenants = tenancy.start(service.metrics.registry)
            service.problem = lambda: tenancy.problem

        def on_started(server: DrainingServer) -> None:
            seconds = time.perf_counter() - started
            logger.info("serving %s on %s, ready in %.1f s", service.model_name, url_of(listener), seconds)
            announce(server)

        apis = load_apis(config, plugins)
        parts.register_metrics(service.metrics.registry)
        app = parts.wrap(build_app(service, apis, parts.routes, tenancy, tracing))
        guard = ConnectionGuard(config.server.limits, service.metrics.registry)
        guard.start()
        await DrainingServer(_uvicorn_config(config, app, guard), service, on_started).serve(sockets=[listener])
        guard.stop()
    finally:
        await engine.stop()
        if templates is not None:
            templates.close()
        if tenancy is not None:
            tenancy.stop()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    return engine.failure


def _started_renderer(config: Config, tokenizer: Tokenizer) -> TemplateRenderer | None:
    """Start to compile the model's chat templates, if it has any."""
    if tokenizer.templates is None:
        return None
    templates = TemplateRenderer(tokenizer.templates, config.server.limits.template_seconds)
    templates.start()
    return templates


@contextlib.contextmanager
def _cancelled_by_signal() -> Iterator[None]:
    """Let SIGTERM cancel the task that runs the block, so that it cleans up. Signals reach the main thread only; in other threads
    nothing changes."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread() or task is None:
        yield
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        logger.info("SIGTERM: the start is given up")
        loop.call_soon_threadsafe(task.cancel)

    previous = signal.signal(signal.SIGTERM, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def url_of(listener: socket.socket) -> str:
    """Return the base URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _metrics(config: Config, engine: EngineHandle, registry: Registry | None) -> Metrics:
    name = config.model.name
    labels, chosen = info_labels(package_version(), name, engine.info), config.metrics
    metrics = Metrics(labels, chosen.compat, name, engine.info, chosen.expert_load)
    up = Gauge("dovetail_engine_up", "1 while the engine runs and responds, else 0.", registry=metrics.registry)
    up.set_function(lambda: engine.alive and not engine.stalled)
    if registry is not None:
        call_hook(registry.hooks, "register_metrics", registry=metrics.registry)
    return metrics


def warn_of_any_proxy(proxies: Sequence[str]) -> None:
    """Log a warning if ``server.trusted_proxies`` trusts every address."""
    for proxy in proxies:
        if ipaddress.ip_network(proxy).prefixlen == 0:
            logger.warning(
                "server.trusted_proxies has %s, which is every address: any client can forge X-Forwarded-For, and so be counted as "
                "any other client or as many; name the addresses of your proxies only",
                proxy,
            )


def _uvicorn_config(config: Config, app: ASGIApp, guard: ConnectionGuard) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=bounded_protocol(guard),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=config.server.log_level == "debug",
        server_header=False,
        proxy_headers=bool(config.server.trusted_proxies),
        forwarded_allow_ips=list(config.server.trusted_proxies),
        timeout_keep_alive=ceil(config.server.limits.idle_seconds),
        timeout_graceful_shutdown=1,
    )


def _bind(config: Config) -> socket.socket:
    """Return a bound socket. It listens only after the engine is ready, so that no client waits for an answer before that."""
    host, port = config.server.host, config.server.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    if not (config.server.keys or config.server.allow_public_without_keys):
        _refuse_public(listener)
    return listener


def _refuse_public(listener: socket.socket) -> None:
    """Raise ``ConfigError`` if other machines can reach the server, because it has no keys."""
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        listener.close()
        raise ConfigError(
            f"server.host is {address!r}, which other machines can reach, and there are no keys; set server.keys (docs/tenants.md), "
            "listen on 127.0.0.1, or allow access without keys with server.allow_public_without_keys=true"
        )


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"server.host {host!r}, server.port {port}: cannot listen there ({error.strerror}); "
        "choose another port, or 0 for a free one"
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.new_event_loop

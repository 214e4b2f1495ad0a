"""Bound the connections of a server: their number, in all and by address, and the time that each may take."""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import logging
import resource
import select
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator

import msgspec
import prometheus_client
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from dovetail.config.server import LimitsSection
from dovetail.server.memory import MemoryTrimmer, collect_if_due

logger = logging.getLogger("dovetail.server")

RESERVED = 128
"""File descriptors that are left for other uses than connections: the engine, files, worker processes."""

SPARE = 64
"""Connections beyond the limit on which only /health is answered, and every other request with 503."""

LINGER_SECONDS = 2.0
"""Seconds in which the rest of a body may arrive after its request was answered. Without them the client could lose the
answer, because the system resets a connection that is closed with unread data."""

_SWEEP_SECONDS = 1.0
_LOG_SECONDS = 10.0
_MOST_CONNECTIONS = 16_384


class ConnectionState(enum.Enum):
    """Name what a connection does now."""

    HEAD = "headers are incomplete"
    BODY = "the body is incomplete"
    ANSWERING = "a request is being answered"
    IDLE = "idle"
    LINGERING = "the rest of an answered request's body is discarded"


class Connection:
    """Hold what the guard knows of a connection. The protocol implements the methods."""

    address = ""
    """The client's address."""

    def __init__(self) -> None:
        self.state = ConnectionState.HEAD
        self.since = 0.0  # time at which the state began
        self.extra = False  # beyond the limit
        self.stalled: tuple[int, float] = (0, 0.0)  # unsent bytes, and the time at which their number changed

    def refuse(self, status: int, message: str) -> None:
        """Answer with an error, unless ``status`` is 0 or another answer has begun, and close."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close at once."""
        raise NotImplementedError

    @property
    def unsent(self) -> int:
        """Return the number of bytes that the client has not taken yet."""
        raise NotImplementedError

    @property
    def unread_descriptor(self) -> int | None:
        """Return the file descriptor if reading is paused, so that the end of the connection would not be noticed."""
        return None


class ConnectionGuard:
    """Accept, watch and close the connections of a server. An object belongs to one event loop.

    A connection *waits* until its request has arrived completely. If there are too many connections, in all or from one
    address, the one that has waited longest is closed to make place for the new one, or else an idle one. If there is
    none, the new connection is taken as an *extra* one, on which only /health is answered.
    """

    def __init__(
        self,
        limits: LimitsSection,
        registry: CollectorRegistry | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.head_bytes = limits.header_kib * 1024
        self.most = limits.connections or default_connections()
        self.most_of_address = limits.connections_per_address or max(self.most * 3 // 4, 1)
        self.shed_counts: Counter[str] = Counter()
        self._clock = clock
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._idle: OrderedDict[Connection, None] = OrderedDict()
        self._all: set[Connection] = set()
        self._by_address: Counter[str] = Counter()
        self._extra = 0
        self._unlogged: Counter[str] = Counter()
        self._next_log = 0.0
        self._last_address = ""
        self._timer: asyncio.TimerHandle | None = None
        self._trimmer = MemoryTrimmer()
        self._metric = prometheus_client.Counter(
            "dovetail_connections_shed",
            "Connections and requests that were closed or refused before they were read, by reason.",
            ["reason"],
            registry=registry or CollectorRegistry(),
        )

    def __len__(self) -> int:
        return len(self._all)

    @property
    def is_answering(self) -> bool:
        """Return True while a request is answered."""
        return any(connection.state is ConnectionState.ANSWERING for connection in self._all)

    def start(self) -> None:
        """Begin to watch the time."""
        self._timer = asyncio.get_running_loop().call_later(_SWEEP_SECONDS, self._tick)

    def stop(self) -> None:
        """Stop watching."""
        if self._timer is not None:
            self._timer.cancel()

    # events, which the protocol reports

    def opened(self, connection: Connection) -> None:
        """Take a new connection; make place for it if there are too many."""
        connection.address = place_of(connection.address)
        self._all.add(connection)
        self._by_address[connection.address] += 1
        reason = ""
        if self._by_address[connection.address] > self.most_of_address:
            reason = "too many connections from one address"
            victim = next(self._victims(connection.address), None)
        elif len(self._all) > self.most:
            reason = "too many connections"
            victim = next(self._victims(None), None)
        else:
            victim = None
        self._enter(connection, ConnectionState.HEAD)
        if victim is not None:
            self._close(victim, 503, reason)
        elif reason:
            connection.extra = True
            self._extra += 1
            if self._extra > SPARE:
                self._close(connection, 503, reason)

    def closed(self, connection: Connection) -> None:
        """Forget a connection."""
        if connection not in self._all:
            return
        self._all.remove(connection)
        self._leave(connection)
        self._extra -= connection.extra
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def began(self, connection: Connection) -> None:
        """Note that bytes have arrived: an idle connection begins a request."""
        if connection.state is ConnectionState.IDLE:
            self._enter(connection, ConnectionState.HEAD)

    def app_for(self, connection: Connection, url: bytes) -> ASGIApp | None:
        """Note that headers are complete. Return the application that answers instead of the server's; None for the server's."""
        if connection.state is not ConnectionState.ANSWERING:
            self._enter(connection, ConnectionState.BODY)
        if not connection.extra or url.partition(b"?")[0] in (b"/health", b"/ping"):
            return None
        self.shed("too many connections", connection)
        return too_many_connections

    def received(self, connection: Connection) -> None:
        """Note that a request is complete."""
        self._enter(connection, ConnectionState.ANSWERING)

    def answered(self, connection: Connection) -> None:
        """Note that all requests are answered."""
        self._enter(connection, ConnectionState.IDLE)

    def lingers(self, connection: Connection) -> None:
        """Note that a request was answered before it was complete."""
        self._enter(connection, ConnectionState.LINGERING)

    def shed(self, reason: str, connection: Connection) -> None:
        """Count and log a connection or request that is refused."""
        self.shed_counts[reason] += 1
        self._unlogged[reason] += 1
        self._last_address = connection.address
        self._metric.labels(reason=reason).inc()
        self._log()

    # time

    def sweep(self) -> None:
        """Close connections that are late."""
        now, limits = self._clock(), self.limits
        for connection in [*self._waiting]:
            age = now - connection.since
            if connection.state is ConnectionState.HEAD and age > limits.header_seconds:
                self._close(connection, 408, "late headers")
            elif connection.state is ConnectionState.BODY and age > limits.body_seconds + LINGER_SECONDS:
                self._close(connection, 408, "late body")
            elif connection.state is ConnectionState.LINGERING and age > LINGER_SECONDS:
                self._close(connection, 408, "late body of a request that was answered")
        for connection in [*self._idle]:
            if now - connection.since <= limits.idle_seconds:
                break
            self._close(connection, 408, "")
        for connection in [*self._all]:
            self._check_answering(connection, now)
        self._log()

    def _check_answering(self, connection: Connection, now: float) -> None:
        unsent = connection.unsent
        if not unsent or unsent != connection.stalled[0]:
            connection.stalled = (unsent, now)
        elif now - connection.stalled[1] > self.limits.write_seconds:
            self.shed("the client takes no data", connection)
            connection.abort()
            return
        descriptor = connection.unread_descriptor
        if descriptor is not None and descriptor >= 0 and _hung_up(descriptor):
            connection.abort()

    def _tick(self) -> None:
        self.start()
        self.sweep()
        if not self.is_answering:
            collect_if_due()
        self._trimmer.poll()

    # state

    def _enter(self, connection: Connection, state: ConnectionState) -> None:
        if connection not in self._all:
            return  # closed already, while the protocol still reads
        self._leave(connection)
        connection.state, connection.since = state, self._clock()
        if state is ConnectionState.IDLE:
            self._idle[connection] = None
        elif state is not ConnectionState.ANSWERING:
            self._waiting[connection] = None

    def _leave(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)
        self._idle.pop(connection, None)

    def _victims(self, address: str | None) -> Iterator[Connection]:
        """Yield the connections that may be closed, of ``address`` or of all, the best first."""
        for queue in (self._waiting, self._idle):
            for connection in queue:
                if address is None or connection.address == address:
                    yield connection

    def _close(self, connection: Connection, status: int, reason: str) -> None:
        if reason:
            self.shed(reason, connection)
        was = connection.state
        self.closed(connection)
        if was in (ConnectionState.IDLE, ConnectionState.LINGERING):
            connection.refuse(0, "")
        else:
            connection.refuse(status, f"The server closes this connection: {reason}.")

    def _log(self) -> None:
        now = self._clock()
        if not self._unlogged or now < self._next_log:
            return
        counts = ", ".join(f"{count} for {reason}" for reason, count in self._unlogged.items())
        logger.warning(
            "connections or requests shed: %s; the last from %s (limits: server.limits)", counts, self._last_address
        )
        self._unlogged.clear()
        self._next_log = now + _LOG_SECONDS


async def too_many_connections(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer 503, as an ASGI application."""
    message = "the server has too many connections; retry later"
    body = msgspec.json.encode({"error": {"message": message, "type": "overloaded", "code": "too_many_connections"}})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def place_of(address: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 network of an IPv6 address, which one client has whole."""
    if ":" not in address:
        return address
    try:
        parsed = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    return str(parsed.ipv4_mapped or ipaddress.IPv6Network((parsed, 64), strict=False))


def default_connections() -> int:
    """Return how many connections fit beside other uses of file descriptors."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(min(soft - RESERVED - SPARE, _MOST_CONNECTIONS), 16)


def raise_descriptors() -> None:
    """Raise this process's limit of file descriptors as far as the system allows, up to what connections can use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + RESERVED + SPARE
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted, hard) if hard >= 0 else wanted, hard))


def _hung_up(descriptor: int) -> bool:
    """Return True if the other side has closed a connection whose data was not read."""
    poll = select.poll()
    poll.register(descriptor, getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))

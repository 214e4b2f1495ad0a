"""Record the usage of tenants: counters for /metrics, and a log with one line for each request."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.errors import ConfigError
from dovetail.server.tenants.tenant import Tenant

_COUNTERS: Mapping[str, tuple[str, Callable[[Tenant], int]]] = {
    "requests": ("Requests that were admitted.", lambda tenant: tenant.used.requests),
    "prompt_tokens": ("Prompt tokens of admitted requests.", lambda tenant: tenant.used.prompt_tokens),
    "cached_prompt_tokens": (
        "Prompt tokens of admitted requests that were found in the prefix cache.",
        lambda tenant: tenant.used.cached_tokens,
    ),
    "generated_tokens": ("Tokens generated for admitted requests.", lambda tenant: tenant.used.completion_tokens),
}
_APPEND = os.O_CREAT | os.O_APPEND | os.O_WRONLY
_REASONS = ("requests", "tokens", "concurrency")


class TenantCollector(Collector):
    """Collect metrics by tenant. Label values are the names in the key file, never text that clients send."""

    def __init__(self, tenants: Mapping[str, Tenant], unknown: Callable[[], int]) -> None:
        """``unknown`` returns the number of requests without a known key."""
        self._tenants = tenants
        self._unknown = unknown

    def collect(self) -> Iterable[Metric]:
        """Yield the metric families with their current values."""
        for name, (text, value) in _COUNTERS.items():
            family = CounterMetricFamily(f"dovetail_tenant_{name}", text, labels=["tenant"])
            for tenant in self._tenants.values():
                family.add_metric([tenant.name], value(tenant))
            yield family
        refused = CounterMetricFamily(
            "dovetail_tenant_refused", "Requests refused because of a limit.", labels=["tenant", "limit"]
        )
        running = GaugeMetricFamily("dovetail_tenant_outputs_running", "Outputs that are running.", labels=["tenant"])
        for tenant in self._tenants.values():
            running.add_metric([tenant.name], tenant.running)
            for reason in _REASONS:
                refused.add_metric([tenant.name, reason], tenant.refused[reason])
        yield refused
        yield running
        yield CounterMetricFamily(
            "dovetail_unauthenticated_requests", "Requests without a known key.", value=self._unknown()
        )


class UsageEntry(msgspec.Struct, omit_defaults=True):
    """Describe one line of the usage log. ``finish`` has the finish reason of each output, ``error`` the name of the error that
    ended the request; ``prompts`` and ``texts`` are set if the log keeps texts. ``seconds`` is the time from the admission of
    the request to its end."""

    time: str
    tenant: str
    key: str
    rid: str
    path: str
    outputs: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    seconds: float
    finish: Sequence[str] = ()
    error: str | None = None
    prompts: Sequence[str] | None = None
    texts: Sequence[str] | None = None


class UsageLog:
    """Append JSON lines to a file that only its owner can read. The file may be moved away at any time: the next line starts a
    new file."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ``ConfigError`` if it cannot be written."""
        try:
            self._handler = _PrivateHandler(path)
        except OSError as error:
            raise ConfigError(f"server.usage_log {str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, entry: UsageEntry) -> None:
        """Write one line. A line that cannot be written is reported on stderr and lost; requests are not affected."""
        line = msgspec.json.encode(entry).decode()
        self._handler.handle(logging.LogRecord("dovetail.usage", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


class _PrivateHandler(WatchedFileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file was moved away, and a new one cannot be created
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        return os.fdopen(os.open(self.baseFilename, _APPEND, 0o600), "a", encoding="utf-8")


def timestamp(seconds: float) -> str:
    """Return a time of day as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

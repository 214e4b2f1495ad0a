"""Who used how much: counters for /metrics, and a log with a line for each request."""

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
    "requests": ("Requests that were let in.", lambda tenant: tenant.used.requests),
    "prompt_tokens": ("Tokens of their prompts.", lambda tenant: tenant.used.prompt_tokens),
    "cached_prompt_tokens": ("Of them, found in the prefix cache.", lambda tenant: tenant.used.cached_tokens),
    "generated_tokens": ("Tokens generated for them.", lambda tenant: tenant.used.completion_tokens),
}
_APPEND = os.O_CREAT | os.O_APPEND | os.O_WRONLY
_REASONS = ("requests", "tokens", "concurrency")


class TenantCollector(Collector):
    """Metrics by tenant. The label takes as many values as the key file has had names: what clients send is no label."""

    def __init__(self, tenants: Mapping[str, Tenant], unknown: Callable[[], int]) -> None:
        """``unknown`` counts the requests without a known key."""
        self._tenants = tenants
        self._unknown = unknown

    def collect(self) -> Iterable[Metric]:
        """The families, as of now."""
        for name, (text, value) in _COUNTERS.items():
            family = CounterMetricFamily(f"dovetail_tenant_{name}", text, labels=["tenant"])
            for tenant in self._tenants.values():
                family.add_metric([tenant.name], value(tenant))
            yield family
        refused = CounterMetricFamily(
            "dovetail_tenant_refused", "Requests refused by a limit.", labels=["tenant", "limit"]
        )
        running = GaugeMetricFamily("dovetail_tenant_outputs_running", "Outputs that are open.", labels=["tenant"])
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
    """A line of the usage log. ``finish`` has a word for each output, ``error`` is what the request ended with otherwise;
    ``prompts`` and ``texts`` are there where the log keeps texts. ``seconds`` are from when it was let in to its end."""

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
    """JSON lines, appended to a file that only its owner can read. The file may be moved away at any time: the next line
    begins another."""

    def __init__(self, path: Path) -> None:
        """Raises ``ConfigError`` where it cannot be written."""
        try:
            self._handler = _PrivateHandler(path)
        except OSError as error:
            raise ConfigError(f"server.usage_log {str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, entry: UsageEntry) -> None:
        """One line. What cannot be written is told on stderr and lost; requests go on."""
        line = msgspec.json.encode(entry).decode()
        self._handler.handle(logging.LogRecord("dovetail.usage", logging.INFO, "", 0, line, None, None))

    def close(self) -> None:
        """Nothing follows."""
        self._handler.close()


class _PrivateHandler(WatchedFileHandler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:  # the file was moved away, and another cannot be begun
            self.handleError(record)

    def _open(self) -> TextIOWrapper:
        return os.fdopen(os.open(self.baseFilename, _APPEND, 0o600), "a", encoding="utf-8")


def timestamp(seconds: float) -> str:
    """A time of day as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

"""Record the usage of tenants: counters for /metrics, and a log with one line for each request."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dovetail.errors import ConfigError
from dovetail.server.tenants.tenant import Tenant

logger = logging.getLogger("dovetail.server")

_COUNTERS: Mapping[str, tuple[str, Callable[[Tenant], int]]] = {
    "requests": ("Requests that were admitted.", lambda tenant: tenant.used.requests),
    "prompt_tokens": ("Prompt tokens of admitted requests.", lambda tenant: tenant.used.prompt_tokens),
    "cached_prompt_tokens": (
        "Prompt tokens of admitted requests that were found in the prefix cache.",
        lambda tenant: tenant.used.cached_tokens,
    ),
    "generated_tokens": ("Tokens generated for admitted requests.", lambda tenant: tenant.used.completion_tokens),
}
_APPEND = os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC
_REPORT_SECONDS = 60.0
_REASONS = ("requests", "tokens", "concurrency")


class TenantCollector(Collector):
    """Collect metrics by tenant. Label values are the names in the key file, never text that clients send."""

    def __init__(self, tenants: Mapping[str, Tenant], unknown: Callable[[], int], log: UsageLog | None) -> None:
        """``unknown`` returns the number of requests without a known key."""
        self._tenants = tenants
        self._unknown = unknown
        self._log = log

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
            "dovetail_usage_log_lost_lines",
            "Lines of the usage log that could not be written.",
            value=0 if self._log is None else self._log.lost,
        )
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
    new file.

    A line that cannot be written, for example because the disk is full, is lost and counted in ``lost``; requests are not affected.
    ``problem`` is why the latest line could not be written; None if it was.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ``ConfigError`` if it cannot be written."""
        self._path = path
        self._torn = False
        self._reported = -math.inf
        self.lost = 0
        self.problem: str | None = None
        try:
            self._file = self._open()
        except OSError as error:
            raise ConfigError(f"server.usage_log {str(path)!r} cannot be written: {error.strerror}") from error

    def write(self, entry: UsageEntry) -> None:
        """Write one line. A line that cannot be written is lost, and reported in the server's log, at most once a minute."""
        line = msgspec.json.encode(entry) + b"\n"
        try:
            self._reopen_if_moved()
            self._append(b"\n" + line if self._torn else line)
        except OSError as error:
            self._lose(error)
        else:
            self.problem = None

    def _append(self, line: bytes) -> None:
        written = os.write(self._file, line)
        self._torn = written != len(line)
        if self._torn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        self.problem = f"the usage log {self._path} cannot be written: {error.strerror}"
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            logger.error("%s; %d lines are lost so far", self.problem, self.lost)

    def _reopen_if_moved(self) -> None:
        now = os.fstat(self._file)
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            there = None
        if there is None or (there.st_dev, there.st_ino) != (now.st_dev, now.st_ino):
            file = self._open()
            os.close(self._file)
            self._file, self._torn = file, False

    def _open(self) -> int:
        return os.open(self._path, _APPEND, 0o600)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def timestamp(seconds: float) -> str:
    """Return a time of day as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")

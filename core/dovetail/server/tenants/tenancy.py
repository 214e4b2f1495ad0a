"""Manage the tenants of one server: find the sender of a request, and read the key file again when it changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry

from dovetail.config.server import ServerSection
from dovetail.config.tenants import ENVIRONMENT, KeyFile, TenantLimits, load_keys
from dovetail.errors import AuthenticationError, ConfigError, PermissionDeniedError
from dovetail.server.tenants.keys import Caller, Headers, KeyRing
from dovetail.server.tenants.tenant import Tenant
from dovetail.server.tenants.usage import TenantCollector, UsageLog

logger = logging.getLogger("dovetail.server")

Stamp = tuple[int, int, int]

_MOST_CHANGES = 5
"""Read a key file that changes in every interval after this number of intervals."""


class Tenancy:
    """Hold the keys and tenants of a server. A tenant keeps its counts when its keys change and when its last key is removed."""

    def __init__(self, section: ServerSection, env: Mapping[str, str]) -> None:
        """Read the keys and open the usage log. Raises ``ConfigError``."""
        assert section.keys is not None
        self._source = section.keys
        self._env = env
        self.tenants: dict[str, Tenant] = {}
        self.unknown = 0
        self._stamp = self._read_stamp()
        self._use(load_keys(self._source, env))
        self.log = UsageLog(Path(section.usage_log).expanduser()) if section.usage_log else None
        self._watch: asyncio.Task[None] | None = None
        self.log_texts = section.usage_log_texts

    def caller(self, headers: Headers) -> Caller:
        """Return the sender of a request. Raises ``AuthenticationError``."""
        try:
            return self._ring.caller(headers)
        except AuthenticationError:
            self.unknown += 1
            raise

    def admin(self, headers: Headers) -> Caller:
        """Return the admin that sent a request. Raises ``AccessError`` if the sender is not an admin."""
        caller = self.caller(headers)
        if not caller.admin:
            raise PermissionDeniedError("this route needs the key of an admin; the given key belongs to a tenant")
        return caller

    def start(self, registry: CollectorRegistry) -> Mapping[str, Tenant]:
        """Register the metrics and watch the key file until ``stop``. Return the tenants by name, a mapping in which tenants that
        are added later appear too."""
        registry.register(TenantCollector(self.tenants, lambda: self.unknown, self.log))
        logger.info("every request needs a key: %s", self.summary)
        self._watch = asyncio.ensure_future(self.watch())
        return self.tenants

    def stop(self) -> None:
        """Stop watching the key file and close the usage log."""
        if self._watch is not None:
            self._watch.cancel()
        if self.log is not None:
            self.log.close()

    async def watch(self, seconds: float = 1.0) -> None:
        """Read the key file again whenever it has changed: once it has not changed for one interval, and is therefore complete, or if
        it changes in every interval. An invalid file leaves the keys as they are. Never returns."""
        seen, changes = self._stamp, 0
        while True:
            await asyncio.sleep(seconds)
            stamp = await asyncio.to_thread(self._read_stamp)
            changes = changes + 1 if stamp != seen else 0
            if stamp != self._stamp and (stamp == seen or changes >= _MOST_CHANGES):
                self._stamp, changes = stamp, 0
                self.reload()
            seen = stamp

    def reload(self) -> bool:
        """Read the keys again. If the file is invalid, log why, keep the old keys and return False."""
        try:
            self._use(load_keys(self._source, self._env))
        except (ConfigError, RecursionError) as error:
            logger.error("the keys were not read again, and the previous ones stay in force: %s", error)
            return False
        logger.info("the keys were read again: %s", self.summary)
        return True

    @property
    def problem(self) -> str | None:
        """Return why lines of the usage log are lost; None if they are not."""
        return self.log.problem if self.log is not None else None

    @property
    def summary(self) -> str:
        """Return the number of tenants and admins, for the log."""
        return f"{len(self._file.tenants)} tenants, {len(self._file.admins)} admins"

    def _use(self, file: KeyFile) -> None:
        self._file = file
        self._ring = KeyRing(file)
        for name, section in file.tenants.items():
            self._set(name, file.limits(name), section.salt or name)
        for name in file.admins:
            self._set(name, TenantLimits(), f"admin:{name}")  # a tenant cannot have this salt

    def _set(self, name: str, limits: TenantLimits, salt: str) -> None:
        if name in self.tenants:
            self.tenants[name].update(limits, salt)
        else:
            self.tenants[name] = Tenant(name, limits, salt)

    def _read_stamp(self) -> Stamp | None:
        """Return values that change when the file does; None if there is no file or the keys are in the environment."""
        if self._source.startswith(ENVIRONMENT):
            return None
        try:
            stat = Path(self._source).expanduser().stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

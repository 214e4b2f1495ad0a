"""Load adapters (LoRA) while requests run, and bring those to the device that waiting requests need.

Files are read on a thread of each rank. Between two steps, an adapter that was read is copied to its slot. A loop without
adapters that are wanted, read or unloaded does nothing here, however many are known. Adapters that are being read count
towards host memory: more are read once there is memory for them.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dovetail.errors import ConfigError
from dovetail.host_memory import usable_memory
from dovetail.messages import (
    AbortLoadsMsg,
    AdapterCommand,
    Answer,
    CommandReply,
    HeldAdapterMsg,
    LoadAdapterMsg,
    UnloadAdapterMsg,
)

if TYPE_CHECKING:
    from dovetail.config.adapters import AdaptersSection
    from dovetail.interfaces.executor import Executor
    from dovetail.scheduler.adapters import KnownAdapter
    from dovetail.scheduler.scheduler import Scheduler

GIB = 1 << 30
HOST_SHARE = 4
"""By default, adapters in host memory take at most one in this number of the bytes of the machine."""
MOST_READS = 2
"""The largest number of adapters that are read at a time: each rank reads them one after another."""
POLL_SECONDS = 0.005
"""The time between two questions to the ranks whether they have read an adapter. Each waits for the step in flight."""


def most_in_host_memory(section: AdaptersSection, rank: int, size: int) -> int:
    """Return how many adapters are kept in host memory. One of ``rank`` takes ``size`` bytes there, on all ranks together. Raises
    ``ConfigError`` if ``adapters.host_gib`` is set and holds none."""
    if section.host_gib is None:
        usable = usable_memory()
        return section.max_host if usable is None else min(section.max_host, max(1, usable // HOST_SHARE // size))
    found = min(section.max_host, int(section.host_gib * GIB) // size)
    if not found:
        raise ConfigError(
            f"adapters.host_gib is {section.host_gib:g}, and one adapter of rank {rank} takes {size / GIB:.3g} GiB in host memory, "
            f"which is the least that is allowed; set a larger adapters.host_gib, a smaller adapters.max_rank, or fewer adapters.modules"
        )
    return found


@dataclass(slots=True, eq=False)
class _Reading:
    """Hold an adapter that the ranks read. ``left`` is the number of ranks that have not finished. ``call_id`` is that of the
    command to load the adapter, or empty if requests wait for it. With ``hold``, the adapter is not known once it is read. If it is
    ``cancelled``, ranks that have not begun to read it do not, and what the others read is dropped when all have finished."""

    adapter: KnownAdapter
    left: int
    call_id: str = ""
    hold: bool = False
    error: str = ""
    stamp: str = ""
    cancelled: bool = False


class AdapterLoader:
    """Carry out commands about adapters, and bring adapters to the device that requests of ``scheduler`` wait for."""

    def __init__(self, section: AdaptersSection, scheduler: Scheduler, executor: Executor) -> None:
        """Raises ``ConfigError`` if an adapter in ``section.load`` cannot be used."""
        self._scheduler, self._executor = scheduler, executor
        self._table = scheduler.adapters
        # to be read, with ``call_id`` and ``hold`` of the command
        self._loads: deque[tuple[KnownAdapter, str, bool]] = deque()
        self._held: dict[str, KnownAdapter] = {}  # by name: read, and not known yet
        self._reading: dict[int, _Reading] = {}
        self._host: OrderedDict[int, KnownAdapter] = OrderedDict()  # read by all ranks; the last was used last
        self._stamps: dict[int, str] = {}
        self._retired: list[KnownAdapter] = []
        self._next_poll = 0.0
        described = self._call("describe")
        self.max_rank: int = described[0][0]
        """The largest rank of an adapter that a slot can hold."""
        self._most_host = most_in_host_memory(section, self.max_rank, sum(size for _, size in described))
        for name, directory in section.load.items():
            stamp, error = self._call("check", directory)[0]
            if error:
                raise ConfigError(f"adapters.load: {name} cannot be loaded: {error}")
            self._stamps[self._table.add(name, directory).key] = stamp

    @property
    def has_work(self) -> bool:
        """Return True while an adapter is read or is to be read, or memory is to be freed of one whose last request has ended."""
        return bool(self._reading or self._loads) or any(map(self._is_unused, self._retired))

    def _call(self, *command: Any) -> list[Any]:
        return self._executor.call("adapters", list(command))

    def handle(self, msg: AdapterCommand) -> list[CommandReply]:
        """Carry out a command. Return its answer, after those of the loads that it ends. ``poll`` returns the answer of a load
        that is not ended."""
        match msg:
            case LoadAdapterMsg():
                self._loads.append((self._table.new(msg.name, msg.directory), msg.call_id, msg.hold))
                return []
            case HeldAdapterMsg():
                return [self._end_hold(msg)]
            case UnloadAdapterMsg():
                return self._unload(msg.name, msg.call_id)
            case AbortLoadsMsg():
                return [*self.abort(msg.message), CommandReply(msg.call_id, True)]

    def _end_hold(self, msg: HeldAdapterMsg) -> CommandReply:
        adapter = self._held.pop(msg.name, None)
        if adapter is None:
            return CommandReply(msg.call_id, False, f"the adapter {msg.name!r:.80} was unloaded before it was known")
        self._retire(self._table.register(adapter) if msg.keep else adapter)
        return CommandReply(msg.call_id, True)

    def _retire(self, adapter: KnownAdapter | None) -> None:
        """Free the memory of an adapter that no new request gets, once all its requests have ended."""
        if adapter is not None:
            self._retired.append(adapter)

    def _unload(self, name: str, call_id: str) -> list[CommandReply]:
        held = name in self._held
        ended = self._end_loads(f"the adapter {name!r:.80} was unloaded before it was read", name)
        adapter = self._table.retire(name)
        self._retire(adapter)
        if not (adapter or ended or held):
            return [CommandReply(call_id, False, f"there is no adapter {name!r:.80}")]
        requests = 0 if adapter is None else adapter.requests
        return [*ended, CommandReply(call_id, True, f"{requests} requests go on with it")]

    def abort(self, message: str) -> list[CommandReply]:
        """End all loads that have not finished with the error ``message``, and return their answers. Adapters that no request
        waits for any more are not read either."""
        ended = self._end_loads(message)
        for reading in self._reading.values():
            if not reading.adapter.requests:
                self._cancel(reading)
        return ended

    def _end_loads(self, message: str, name: str | None = None) -> list[CommandReply]:
        """End the loads of ``name``, by default all, that have not finished, and drop what they hold. Return their answers."""
        self._retired += [self._held.pop(held) for held in [*self._held] if name in (None, held)]
        ended: list[str] = []
        for reading in self._reading.values():
            if reading.call_id and name in (None, reading.adapter.name):
                ended.append(reading.call_id)
                self._cancel(reading)
        ended += [call_id for adapter, call_id, _ in self._loads if name in (None, adapter.name)]
        self._loads = deque(load for load in self._loads if name not in (None, load[0].name))
        return [CommandReply(call_id, False, message) for call_id in ended]

    def _cancel(self, reading: _Reading) -> None:
        """Keep ranks that have not begun to read an adapter from reading it. ``poll`` drops what the others have read."""
        if not reading.cancelled:
            reading.call_id, reading.cancelled = "", True
            self._call("cancel", reading.adapter.key)

    def poll(self) -> list[Answer]:
        """Do what is due between two steps. Return the answers of commands and of requests whose adapter cannot be read."""
        if not (self._reading or self._loads or self._table.wanted or self._retired):
            return []
        answers: list[Answer] = []
        if self._reading:
            answers += self._collect()
        absent = self._bring() if self._table.wanted else []
        for adapter in absent:  # before the commands, because requests wait for them
            if not self._makes_space():
                break
            self._read(adapter)
        while self._loads and self._makes_space():
            self._read(*self._loads.popleft())
        if self._retired:
            self._retired = [adapter for adapter in self._retired if not self._removed(adapter)]
        return answers

    def _makes_space(self) -> bool:
        """Return True if one more adapter may be read now, after dropping the one in host memory that was used least recently if need
        be; False if enough are being read, or those take all of the memory."""
        if len(self._reading) >= MOST_READS:
            return False
        if len(self._host) + len(self._reading) < self._most_host:
            return True
        if not self._host:
            return False
        self._call("drop", self._host.popitem(last=False)[0])
        return True

    def _bring(self) -> list[KnownAdapter]:
        """Copy adapters that requests wait for to slots. Return those that are to be read first."""
        table = self._table
        absent: list[KnownAdapter] = []
        for adapter in list(itertools.islice(table.wanted.values(), table.num_slots)):
            if not adapter.requests:
                table.give_up(adapter)
            elif not table.has_place(adapter) or adapter.key in self._reading:
                continue
            elif adapter.key in self._host:
                self._host.move_to_end(adapter.key)
                self._call("install", adapter.key, table.take_slot(adapter))
            else:
                absent.append(adapter)
        return absent

    def _read(self, adapter: KnownAdapter, call_id: str = "", hold: bool = False) -> None:
        left = len(self._call("read", adapter.key, adapter.directory, self._stamps.get(adapter.key, "")))
        self._reading[adapter.key] = _Reading(adapter, left, call_id, hold)

    def _collect(self) -> list[Answer]:
        """Return the answers about adapters that all ranks have read."""
        now = time.monotonic()
        if now < self._next_poll:
            if not self._scheduler.has_work:
                time.sleep(min(self._next_poll - now, POLL_SECONDS))
            return []
        answers: list[Answer] = []
        for key, stamp, error in itertools.chain(*self._call("poll")):
            reading = self._reading[key]
            if reading.stamp and stamp and stamp != reading.stamp:
                error = f"the files in {reading.adapter.directory} changed while they were read; load it again"
            reading.left, reading.error = reading.left - 1, reading.error or error
            reading.stamp = reading.stamp or stamp
            if not reading.left:
                del self._reading[key]
                answers += self._was_read(reading)
        self._next_poll = time.monotonic() + POLL_SECONDS
        return answers

    def _was_read(self, reading: _Reading) -> list[Answer]:
        adapter, error = reading.adapter, reading.error
        if reading.cancelled:
            self._call("drop", adapter.key)
            return []
        if not error:
            self._stamps.setdefault(adapter.key, reading.stamp)
            self._host[adapter.key] = adapter
            if not reading.call_id:
                return []
            if reading.hold:
                self._retire(self._held.pop(adapter.name, None))
                self._held[adapter.name] = adapter
            else:
                self._retire(self._table.register(adapter))
            return [CommandReply(reading.call_id, True)]
        self._call("drop", adapter.key)
        self._table.totals.failures += 1
        self._table.give_up(adapter)
        if reading.call_id:
            return [CommandReply(reading.call_id, False, error)]
        return self._scheduler.refuse_adapter(adapter, f"adapter {adapter.name} could not be read: {error}")

    def _is_unused(self, adapter: KnownAdapter) -> bool:
        return not adapter.requests and adapter.key not in self._reading

    def _removed(self, adapter: KnownAdapter) -> bool:
        """Free the memory of an unloaded adapter if all its requests have ended."""
        if not self._is_unused(adapter):
            return False
        self._table.leave_slot(adapter)
        self._stamps.pop(adapter.key, None)
        if self._host.pop(adapter.key, None) is not None:
            self._call("drop", adapter.key)
        return True

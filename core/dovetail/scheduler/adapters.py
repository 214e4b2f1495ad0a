"""Decide which adapters are on the device: a request is admitted once its adapter has a slot there.

An adapter that a waiting request needs is brought to the device by ``loop.adapters``; other requests go on meanwhile. If no
slot is free, the adapter that was used least recently, and that no running request uses, gives its slot up. If running requests
use all of them, one slot is reserved: requests for its adapter that arrived later wait until it was exchanged, so that
every request gets its turn.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dovetail.errors import RequestError

if TYPE_CHECKING:
    from dovetail.types import Req


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """Hold one version of an adapter. ``key`` is its number, which no other version has. ``slot`` is its place on the device, 0
    if it has none. ``running`` counts the requests that compute with it, ``requests`` those that have not ended."""

    name: str
    directory: str
    key: int
    slot: int = 0
    running: int = 0
    requests: int = 0
    used: int = 0  # larger than that of adapters that were admitted earlier
    retired: bool = False  # it was unloaded or replaced: no new request gets it

    @property
    def namespace(self) -> str:
        """Return the part of a namespace of cached prefixes that separates this version from all others."""
        return f"{self.name}@{self.key}"


@dataclass(slots=True, eq=False)
class AdapterTotals:
    """Count what has happened to adapters since the start."""

    installed: int = 0
    evicted: int = 0
    failures: int = 0


@dataclass(slots=True, eq=False)
class AdapterTable:
    """Hold all known adapters, and which of them is in each of ``num_slots`` slots. No method takes time for each adapter that is
    known, except those that list them."""

    num_slots: int
    known: dict[str, KnownAdapter] = field(default_factory=dict)
    slots: list[KnownAdapter | None] = field(init=False)  # slot i + 1
    wanted: dict[int, KnownAdapter] = field(
        default_factory=dict
    )  # by key, in the order in which they were first needed
    totals: AdapterTotals = field(default_factory=AdapterTotals)
    _keys: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _reserved: dict[int, KnownAdapter] = field(default_factory=dict)  # by slot: the adapter that gets it next

    def __post_init__(self) -> None:
        self.slots = [None] * self.num_slots

    # -- adapters ----------------------------------------------------------------------------------------------------

    def add(self, name: str, directory: str) -> KnownAdapter:
        """Make an adapter known whose name is not taken."""
        adapter = self.new(name, directory)
        self.register(adapter)
        return adapter

    def register(self, adapter: KnownAdapter) -> KnownAdapter | None:
        """Make a version known. Return the one whose place it takes, whose requests keep it, or None."""
        previous = self.retire(adapter.name)
        self.known[adapter.name] = adapter
        return previous

    def new(self, name: str, directory: str) -> KnownAdapter:
        """Return a version of an adapter that is not known yet."""
        return KnownAdapter(name, directory, next(self._keys))

    def retire(self, name: str) -> KnownAdapter | None:
        """Let no new request have this adapter. Return it, or None if it is not known."""
        adapter = self.known.pop(name, None)
        if adapter is not None:
            adapter.retired = True
        return adapter

    # -- requests ----------------------------------------------------------------------------------------------------

    def attach(self, req: Req, name: str, directory: str = "", param: str = "model") -> None:
        """Give a request its adapter, which is made known if ``directory`` is given. Raises ``RequestError`` about the field
        ``param`` if it is not known."""
        adapter = self.known.get(name)
        if adapter is None and directory and self.num_slots:
            adapter = self.add(name, directory)
        if adapter is None:
            raise RequestError(
                f"{param} names the adapter {name!r:.80}, which the engine does not know; load it first",
                param=param,
                code="unknown_adapter",
            )
        req.adapter = adapter
        req.namespace = f"{adapter.namespace}/{req.namespace}"

    def may_run(self, req: Req) -> bool:
        """Return True if the adapter of a waiting request is on the device. Otherwise it is wanted from now on."""
        adapter: KnownAdapter = req.adapter
        if adapter.slot:
            return adapter.slot not in self._reserved
        self.wanted[adapter.key] = adapter
        return False

    def entered(self, req: Req) -> None:
        """Note that a request with an adapter runs from now on."""
        adapter: KnownAdapter = req.adapter
        adapter.running += 1
        adapter.used = next(self._keys)

    def stats(self) -> dict[str, int]:
        """Return the gauges and totals of adapters, by their names in ``EngineStats``."""
        resident = [adapter for adapter in self.slots if adapter is not None]
        return {
            "adapters_known": len(self.known),
            "adapters_resident": len(resident),
            "adapters_running": sum(adapter.running > 0 for adapter in resident),
            "adapters_waiting": len(self.wanted),
            "adapters_installed": self.totals.installed,
            "adapters_evicted": self.totals.evicted,
            "adapters_failed": self.totals.failures,
        }

    # -- slots -------------------------------------------------------------------------------------------------------

    def take_slot(self, adapter: KnownAdapter) -> int:
        """Give ``adapter`` a slot and return it. Return 0 if running requests use all of them."""
        slot = self._slot_for(adapter)
        if not slot:
            return 0
        previous = self.slots[slot - 1]
        if previous is not None:
            previous.slot = 0
            self.totals.evicted += 1
        self._reserved.pop(slot, None)
        self.wanted.pop(adapter.key, None)
        self.slots[slot - 1] = adapter
        adapter.slot, adapter.used = slot, next(self._keys)
        self.totals.installed += 1
        return slot

    def leave_slot(self, adapter: KnownAdapter) -> None:
        """Take the slot of an adapter that no request uses."""
        assert not adapter.running, "running requests use the adapter"
        self.give_up(adapter)
        if adapter.slot:
            self.slots[adapter.slot - 1] = None
            adapter.slot = 0

    def give_up(self, adapter: KnownAdapter) -> None:
        """Forget that an adapter is wanted."""
        self.wanted.pop(adapter.key, None)
        self._reserved = {slot: own for slot, own in self._reserved.items() if own is not adapter}

    def _slot_for(self, adapter: KnownAdapter) -> int:
        own = [slot for slot, owner in self._reserved.items() if owner is adapter]
        free = own or [slot for slot in range(1, self.num_slots + 1) if slot not in self._reserved]
        idle = [slot for slot in free if (holder := self.slots[slot - 1]) is None or not holder.running]
        return min(idle, key=self._last_use, default=0)

    def has_place(self, adapter: KnownAdapter) -> bool:
        """Return True if ``take_slot`` would give ``adapter`` a slot. Otherwise running requests use all slots: reserve one of
        them for it, so that no new request makes it wait longer."""
        if self._slot_for(adapter):
            return True
        self._reserve(adapter)
        return False

    def _reserve(self, adapter: KnownAdapter) -> None:
        if adapter in self._reserved.values():
            return
        others = [slot for slot in range(1, self.num_slots + 1) if slot not in self._reserved]
        if others:
            self._reserved[min(others, key=self._last_use)] = adapter

    def _last_use(self, slot: int) -> int:
        holder = self.slots[slot - 1]
        return -1 if holder is None else holder.used

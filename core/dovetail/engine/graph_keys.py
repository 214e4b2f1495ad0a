"""Choose the captured decode step in which a batch runs, and list the steps that may be captured."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from dovetail.engine.captures import larger_sizes
from dovetail.ops.adapter_weights import AdapterCount
from dovetail.ops.low_rank import kernel_count

if TYPE_CHECKING:
    from dovetail.engine.adapters import EngineAdapters
    from dovetail.engine.own_graphs import OwnRowsOfGraphs
    from dovetail.types import Batch

T = TypeVar("T")


class GraphKey(NamedTuple):
    """Identify a captured step by its number of rows, by the number of cache groups in which it reads shared prefixes once
    (see ``PrefixSharing``), by the attention backend's variant, by how many adapters its rows may have, and, with
    data-parallel attention, by the level of its own rows, an index in ``OwnRowsOfGraphs.levels``."""

    rows: int
    shared: int
    variant: int = 0
    adapters: AdapterCount = AdapterCount.NONE
    own: int = 0


class GraphKeys:
    """List the keys of captured decode steps: all numbers of rows in ``sizes``, all levels of shared prefixes in ``shared``, and the
    variants, numbers of adapters and levels of own rows that have occurred in batches. ``has_variant`` is that of the ``AttentionBackend``."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        shared: Sequence[int],
        adapters: EngineAdapters | None,
        own: OwnRowsOfGraphs | None,
        has_variant: Callable[[int, int], bool],
    ) -> None:
        self.sizes, self.shared = sizes, shared
        self._has_variant = has_variant
        self._adapters, self._own = adapters, own
        self._variants = [0]
        self._adapter_counts = [AdapterCount.NONE]
        self._own_levels = [0]

    def key_for(self, batch: Batch) -> GraphKey | None:
        """Return the key of the graph that a decode batch needs, or None if there can be none: the batch has more rows than any graph, or adapters
        that graphs do not have. Note what occurs in the batch."""
        at = bisect_left(self.sizes, len(batch.slots))
        if at == len(self.sizes) or (batch.adapters is not None and self._adapters is None):
            return None
        rows, count, level = self.sizes[at], AdapterCount.NONE, 0
        if batch.adapters is not None and self._adapters is not None:
            count = self._adapters.count(batch)
        if self._own is not None:
            level = self._own.level_for(batch, rows)
        _note(self._variants, batch.variant)
        _note(self._adapter_counts, count)
        _note(self._own_levels, level)
        return GraphKey(
            rows, 0 if batch.shared is None else batch.shared.level, batch.variant, kernel_count(count, rows), level
        )

    def possible(self) -> Iterator[GraphKey]:
        """Yield all keys, each once: those without shared prefixes and with few rows come first, and variants, numbers of adapters and levels in the
        order in which they have occurred."""
        found: set[GraphKey] = set()
        for level, count, variant, shared, rows in product(
            self._own_levels, self._adapter_counts, self._variants, self.shared, self.sizes
        ):
            key = GraphKey(rows, shared, variant, kernel_count(count, rows), level)
            if level < len(self.own_counts(rows)) and key not in found and self.graph_has_variant(variant, rows):
                found.add(key)
                yield key

    def larger(self, key: GraphKey) -> Iterator[GraphKey]:
        """Yield the keys of other graphs in which the step of ``key`` may run, the fastest first: more rows, or more own rows, cost less than
        kernels for more adapters."""
        least = self.own_counts(key.rows)[key.own]
        counts = [count for count in AdapterCount if count >= key.adapters] if key.adapters else [key.adapters]
        sizes = (key.rows, *larger_sizes(self.sizes, key.rows))
        found = (
            key._replace(rows=rows, adapters=kernel_count(count, rows), own=level)
            for count in counts
            for rows in sizes
            for level, own in enumerate(self.own_counts(rows))
            if own >= least
        )
        return (larger for larger in dict.fromkeys(found) if larger != key)

    def graph_has_variant(self, variant: int, size: int) -> bool:
        """Return whether a batch that needs a graph of ``size`` rows may have this variant."""
        return not variant or self._has_variant(variant, fewest_rows(self.sizes, size))

    def own_counts(self, rows: int) -> list[int]:
        """Return the number of own rows at each level of a step of ``rows`` rows, 0 if there are none."""
        return [0] if self._own is None else self._own.levels(rows)


def fewest_rows(sizes: Sequence[int], size: int) -> int:
    """Return the smallest number of rows that need a graph of ``size`` rows, one of the ascending ``sizes``."""
    at = bisect_left(sizes, size)
    return sizes[at - 1] + 1 if at else 1


def _note(occurred: list[T], value: T) -> None:
    if value not in occurred:
        occurred.append(value)

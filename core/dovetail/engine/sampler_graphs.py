"""Capture and replay samplers as CUDA graphs. Such a graph is replayed after that of a captured step, if the step's
rows need no more than filters and a random number."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, GraphRecorder
from dovetail.engine.device import lost_device
from dovetail.ops.sampling import Filters

if TYPE_CHECKING:
    from dovetail.engine.settings import RowSettings

log = logging.getLogger(__name__)


class SampleMode(NamedTuple):
    """Describe what a captured sampler does. In a sampler that is greedy for all rows, ``sampled`` is False."""

    sampled: bool
    any_greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False

    @classmethod
    def of(cls, filters: Filters | None) -> SampleMode:
        """Return the mode for these filters."""
        if filters is None:
            return cls(False)
        columns = (filters.top_k, filters.top_p, filters.min_p)
        return cls(True, filters.any_greedy, *(column is not None for column in columns))


class SamplerGraphs:
    """Capture and replay samplers. There is one for each step and mode. Not thread-safe."""

    def __init__(self, rows: int, recorder: GraphRecorder, device: torch.device) -> None:
        """``rows`` is the largest number of rows of a step."""
        self._columns = _Columns(rows, device)
        self._recorder = recorder
        self._graphs: dict[tuple[Hashable, SampleMode], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._needed: Counter[tuple[Hashable, SampleMode]] = Counter()

    def replay(
        self, step: Hashable, rows: int, settings: RowSettings, draw: Callable[[Filters | None], torch.Tensor]
    ) -> torch.Tensor | None:
        """Replay ``draw`` for a step of ``rows`` rows and return its result, which is valid until the next replay.
        ``draw`` gets filters at fixed addresses, or None if all rows are greedy. It is captured once it has been needed
        ``NEEDED_BEFORE_CAPTURE`` times; capturing runs it several times. Until then, or if its capture has failed, do
        nothing and return None."""
        key = step, SampleMode.of(settings.filters)
        if key not in self._graphs:
            self._needed[key] += 1
            if self._needed[key] < NEEDED_BEFORE_CAPTURE or not self._captured(key, rows, settings, draw):
                return None
        self._columns.set(settings)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    @torch.inference_mode()
    def _captured(
        self,
        key: tuple[Hashable, SampleMode],
        rows: int,
        settings: RowSettings,
        draw: Callable[[Filters | None], torch.Tensor],
    ) -> bool:
        self._columns.set(settings)
        filters = self._columns.filters(rows, key[1])
        try:
            self._graphs[key] = self._recorder.record(lambda: draw(filters))
        except Exception as error:
            if lost_device(error):
                raise
            log.exception("a sampler of %d rows could not be captured, and will be launched kernel by kernel", rows)
            self._needed[key] = -sys.maxsize
            return False
        return True


class _Columns:
    """Hold the filters of the rows of a step at fixed addresses."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature = torch.ones(rows, 1, device=device)
        self.top_k = torch.ones(rows, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 1, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self._version = 0  # ``RowSettings.version`` of the settings that were copied last

    def set(self, settings: RowSettings) -> None:
        """Copy the filters of ``settings``, unless the last call copied the same settings."""
        if settings.version == self._version:
            return
        self._version, filters = settings.version, settings.filters
        if filters is None:
            return
        pairs = (
            (self.temperature, filters.temperature),
            (self.top_k, filters.top_k),
            (self.top_p, filters.top_p),
            (self.min_p, filters.min_p),
        )
        for column, values in pairs:
            if values is not None:
                column[: len(values)].copy_(values)

    def filters(self, rows: int, mode: SampleMode) -> Filters | None:
        """Return views of the first ``rows`` rows of the columns that ``mode`` needs, or None for a greedy sampler."""
        if not mode.sampled:
            return None
        return Filters(
            self.temperature[:rows],
            self.top_k[:rows] if mode.top_k else None,
            self.top_p[:rows] if mode.top_p else None,
            self.min_p[:rows] if mode.min_p else None,
            mode.any_greedy,
        )

"""Capture and replay samplers as CUDA graphs. Such a graph is replayed after that of a captured step, if the step's
rows need neither a grammar nor very many biases or log-probabilities."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.captures import NEEDED_BEFORE_CAPTURE, GraphRecorder
from dovetail.engine.device import lost_device
from dovetail.engine.settings import BLOCKED, MOST_EDITS, TOP_LADDER, Edits, captured_top
from dovetail.errors import RankLostError
from dovetail.ops.logprobs import chosen_and_top
from dovetail.ops.penalties import apply_penalties, penalised
from dovetail.ops.sampling import Filters, greedy, sample
from dovetail.types import Logprobs

if TYPE_CHECKING:
    from dovetail.engine.penalties import TokenCounts
    from dovetail.engine.settings import RowSettings

log = logging.getLogger(__name__)


class SampleMode(NamedTuple):
    """Describe what a captured sampler does. In a sampler that is greedy for all rows, ``sampled`` is False. With
    ``logprobs`` it computes log-probabilities, also of this number of most likely tokens; 0 means none at all."""

    sampled: bool
    any_greedy: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    penalties: bool = False
    edits: bool = False
    logprobs: int = 0

    @classmethod
    def of(cls, settings: RowSettings) -> SampleMode:
        """Return the mode for these settings, which must be capturable."""
        filters = settings.filters
        penalties, edits = settings.penalties is not None, settings.edits is not None
        top = (captured_top(settings.top_logprobs) or 0) if settings.logprobs else 0
        if filters is None:
            return cls(False, penalties=penalties, edits=edits, logprobs=top)
        columns = (filters.top_k is not None, filters.top_p is not None, filters.min_p is not None)
        return cls(True, filters.any_greedy, *columns, penalties, edits, top)


class Sampling(NamedTuple):
    """Hold what a captured sampler reads besides logits, and where it leaves log-probabilities, all at fixed addresses.
    ``filters`` is None if all rows are greedy, ``penalties`` (float32 ``[rows, 3]``) if no row has penalties, ``edits``
    if no row has biases or ``min_new_tokens``, and ``logprobs`` if no row requests them."""

    filters: Filters | None
    penalties: torch.Tensor | None = None
    edits: Edits | None = None
    logprobs: Logprobs | None = None

    def draw(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        uniform: torch.Tensor,
        counts: TokenCounts,
    ) -> torch.Tensor:
        """Choose a token for each row of ``logits [rows, V]`` and return them, int64 ``[rows]``. ``slots`` int64
        ``[rows]`` are the rows' slots, to which the tokens are added if there are penalties, ``prefix_lens`` int32
        ``[rows]`` is ``Batch.prefix_lens``, and ``uniform`` are the rows' random numbers."""
        given = logits
        if self.penalties is not None:
            out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
            given = apply_penalties(logits, counts.table, slots, self.penalties, out)
        if self.edits is not None:
            given = logits.to(torch.float32, copy=True) if given is logits else given
            self._edit(given, self.edits, logits, slots, prefix_lens, counts)
        tokens = greedy(given) if self.filters is None else sample(given, self.filters, uniform)
        if self.penalties is not None:
            counts.add(slots, tokens)
        if self.logprobs is not None:
            chosen_and_top(logits, tokens, *self.logprobs)
        return tokens

    def _edit(
        self,
        processed: torch.Tensor,
        edits: Edits,
        logits: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        counts: TokenCounts,
    ) -> None:
        """Write the logits of the edited tokens to ``processed``, which has all logits with penalties applied."""
        tokens, biases, until = edits
        x = logits.gather(1, tokens).float() + biases
        if self.penalties is not None:
            words = counts.table.view(-1)[slots[:, None] * counts.table.shape[1] + tokens]
            x = penalised(x, words, self.penalties[:, None])
        x.masked_fill_(prefix_lens[:, None] + 1 < until, BLOCKED)
        processed.scatter_(1, tokens, x)


class SamplerGraphs:
    """Capture and replay samplers. There is one for each step and mode. Not thread-safe."""

    def __init__(
        self, rows: int, recorder: GraphRecorder, device: torch.device, counts: TokenCounts | None = None
    ) -> None:
        """``rows`` is the largest number of rows of a step. ``counts`` are the counts that captured samplers change, if
        they change any."""
        self._columns = _Columns(rows, device)
        self._recorder = recorder
        self._counts = counts
        self._graphs: dict[tuple[Hashable, SampleMode], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._needed: Counter[tuple[Hashable, SampleMode]] = Counter()

    def replay(
        self, step: Hashable, rows: int, settings: RowSettings, draw: Callable[[Sampling], torch.Tensor]
    ) -> torch.Tensor | None:
        """Replay ``draw`` for a step of ``rows`` rows and return its result, which is valid until the next replay.
        ``settings`` must be capturable. ``draw`` is captured once it has been needed ``NEEDED_BEFORE_CAPTURE`` times;
        capturing runs it several times, and counts no tokens. Until then, or if its capture has failed, do nothing and
        return None."""
        key = step, SampleMode.of(settings)
        if key not in self._graphs:
            self._needed[key] += 1
            if self._needed[key] < NEEDED_BEFORE_CAPTURE or not self._captured(key, rows, settings, draw):
                return None
        self._columns.set(settings)
        graph, result = self._graphs[key]
        graph.replay()
        return result

    def logprobs(self, rows: int, settings: RowSettings) -> Logprobs | None:
        """Return the log-probabilities of the first ``rows`` rows of the sampler that was replayed last, with
        ``settings``, or None if no row requests them. They are valid until the next replay."""
        return self._columns.logprobs(rows, SampleMode.of(settings).logprobs)

    @torch.inference_mode()
    def _captured(
        self,
        key: tuple[Hashable, SampleMode],
        rows: int,
        settings: RowSettings,
        draw: Callable[[Sampling], torch.Tensor],
    ) -> bool:
        self._columns.set(settings)
        sampling = self._columns.sampling(rows, key[1])
        try:
            with nullcontext() if self._counts is None else self._counts.paused():
                self._graphs[key] = self._recorder.record(lambda: draw(sampling))
        except Exception as error:
            if isinstance(error, RankLostError) or lost_device(error):
                raise
            log.exception("a sampler of %d rows could not be captured, and will be launched kernel by kernel", rows)
            self._needed[key] = -sys.maxsize
            return False
        return True


class _Columns:
    """Hold the settings of the rows of a step, and the log-probabilities that it computes, at fixed addresses."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.temperature = torch.ones(rows, 1, device=device)
        self.top_k = torch.ones(rows, 1, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, 1, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.penalties = torch.tensor([1.0, 0.0, 0.0], device=device).repeat(rows, 1)
        self.edits = Edits(
            torch.zeros(rows, MOST_EDITS, dtype=torch.int64, device=device),
            torch.zeros(rows, MOST_EDITS, device=device),
            torch.zeros(rows, MOST_EDITS, dtype=torch.int32, device=device),
        )
        self._logprobs = {
            top: Logprobs(
                torch.zeros(rows, device=device),
                torch.zeros(rows, top, device=device),
                torch.zeros(rows, top, dtype=torch.int64, device=device),
            )
            for top in TOP_LADDER
        }
        self._version = 0  # ``RowSettings.version`` of the settings that were copied last

    def set(self, settings: RowSettings) -> None:
        """Copy the columns of ``settings``, unless the last call copied the same settings."""
        if settings.version == self._version:
            return
        self._version, filters = settings.version, settings.filters
        pairs = [(self.penalties, settings.penalties)]
        if settings.edits is not None:
            pairs += zip(self.edits, settings.edits, strict=True)
        if filters is not None:
            pairs += [
                (self.temperature, filters.temperature),
                (self.top_k, filters.top_k),
                (self.top_p, filters.top_p),
                (self.min_p, filters.min_p),
            ]
        for column, values in pairs:
            if values is not None:
                column[: len(values)].copy_(values)

    def logprobs(self, rows: int, top: int) -> Logprobs | None:
        """Return views of the first ``rows`` rows of the log-probabilities with ``top`` most likely tokens, or None if
        ``top`` is 0."""
        return Logprobs(*(column[:rows] for column in self._logprobs[top])) if top else None

    def sampling(self, rows: int, mode: SampleMode) -> Sampling:
        """Return views of the first ``rows`` rows of the columns that ``mode`` needs."""
        filters = None
        if mode.sampled:
            filters = Filters(
                self.temperature[:rows],
                self.top_k[:rows] if mode.top_k else None,
                self.top_p[:rows] if mode.top_p else None,
                self.min_p[:rows] if mode.min_p else None,
                mode.any_greedy,
            )
        return Sampling(
            filters,
            self.penalties[:rows] if mode.penalties else None,
            Edits(*(column[:rows] for column in self.edits)) if mode.edits else None,
            self.logprobs(rows, mode.logprobs),
        )

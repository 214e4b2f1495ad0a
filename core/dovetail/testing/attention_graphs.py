"""Decode steps of an attention backend in CUDA graphs, as the engine runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend
from dovetail.testing.attention_reference import Case, Step
from dovetail.types import Batch

WARM_UPS = 2


class CapturedDecode:
    """``forward`` of a backend, captured for ``rows`` rows over the pool of ``whole``. Call it under inference mode."""

    def __init__(self, backend: AttentionBackend, whole: Step, rows: int, *, shared: bool) -> None:
        self._backend, self._whole, self._rows = backend, whole, rows
        static = self._static = self.step(whole.case, [], [] if shared else None)
        longest = np.full(rows, whole.context().max_context - 1, np.int32)
        static.batch.prefix_lens = longest
        backend.plan_capture(static.batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                backend.forward(static.q, static.layer, static.batch)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._out = backend.forward(static.q, static.layer, static.batch)

    def step(self, base: Case, prefix: Sequence[int], groups: Sequence[tuple[int, int]] | None) -> Step:
        """A step of rows with these prefixes, filled up with padding."""
        real = list(prefix[: self._rows])
        padding = self._rows - len(real)
        case = replace(base, prefix=real + [0] * padding, extend=[1] * self._rows, padding=padding, groups=groups)
        return Step(case, self._whole.device, self._whole)

    def replay(self, step: Step) -> torch.Tensor:
        """What the graph computes for ``step``."""
        copy_inputs(step, self._static)
        self._backend.plan_replay(self._static.batch)
        self._out.fill_(torch.nan)
        self._graph.replay()
        return self._out.clone()


def copy_inputs(source: Step, target: Step) -> None:
    """Copy the queries, lengths and tables of ``source`` to the tensors of ``target``, which keep their addresses."""
    given, batch = source.batch, target.batch
    for to, tensor in zip(_tensors(batch), _tensors(given), strict=True):
        to.copy_(tensor)
    target.q.copy_(source.q)
    batch.prefix_lens = given.prefix_lens
    if batch.shared is not None and given.shared is not None:
        batch.shared.starts, batch.shared.lens = given.shared.starts, given.shared.lens


def _tensors(batch: Batch) -> list[torch.Tensor]:
    found = [batch.positions, batch.qo_indptr, batch.kv_lens, batch.page_table]
    if batch.shared is not None:
        shared = batch.shared
        found += [shared.indptr, shared.group_lens, shared.group_table, shared.own_lens]
    return found

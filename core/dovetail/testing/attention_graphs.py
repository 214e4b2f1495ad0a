"""Run decode and verify steps of an attention backend in CUDA graphs, as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from dovetail.interfaces.attention import AttentionBackend
from dovetail.testing.attention_reference import AttentionCase, AttentionStep
from dovetail.testing.batches import make_tree_mask
from dovetail.types import Batch

WARM_UPS = 2


VERIFY_TOKENS, VERIFY_WIDTH = 16, 5
VERIFY_REPLAYS: tuple[tuple[list[int], list[list[int]]], ...] = (
    ([70, 65, 200], [[-1, 0, 1, 2], [], [-1, 0]]),
    ([180, 0, 199, 33], [[-1, 0, 1, 2], [-1, 0], [-1, 0, 1, 2], [-1]]),
    ([5], [[-1]]),
    ([12, 31, 64, 150, 15, 16], [[-1, -1, 0, 1], [-1], [], [-1, -1], [], [-1, -1]]),
    ([64, 190], [[-1, 0, 0, 2], [-1, -1, 1, 1]]),
)
"""Prefixes and trees of verify steps that are replayed one after the other in a graph of ``VERIFY_TOKENS`` tokens."""


class CapturedForward:
    """Capture ``forward`` of a backend for two layers of the step ``static``; the second one is compared. Use it in
    inference mode."""

    def __init__(self, backend: AttentionBackend, static: AttentionStep) -> None:
        self._backend, self._static = backend, static
        backend.plan_capture(static.batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=stream):
            self._out = self._forward()

    def _forward(self) -> torch.Tensor:
        static = self._static
        self._backend.forward(static.q, static.other_layer, static.batch)
        return self._backend.forward(static.q, static.layer, static.batch)

    def replay(self, step: AttentionStep) -> torch.Tensor:
        """Return what the graph computes for ``step``."""
        copy_inputs(step, self._static)
        self._backend.plan_replay(self._static.batch)
        self._out.fill_(torch.nan)
        self._graph.replay()
        return self._out.clone()


class CapturedDecodeForward(CapturedForward):
    """Capture decode steps of ``rows`` rows over the pool of ``whole``."""

    def __init__(self, backend: AttentionBackend, whole: AttentionStep, rows: int, *, shared: bool) -> None:
        self._whole, self._rows = whole, rows
        static = self.step(whole.case, [], [] if shared else None)
        static.batch.prefix_lens = np.full(rows, whole.context().max_context - 1, np.int32)
        super().__init__(backend, static)

    def step(
        self, base: AttentionCase, prefix: Sequence[int], groups: Sequence[tuple[int, int]] | None
    ) -> AttentionStep:
        """Return a step of rows with these prefixes, filled up with padding."""
        real = list(prefix[: self._rows])
        padding = self._rows - len(real)
        case = replace(base, prefix=real + [0] * padding, extend=[1] * self._rows, padding=padding, groups=groups)
        return AttentionStep(case, self._whole.device, self._whole)


class CapturedVerifyForward(CapturedForward):
    """Capture verify steps of ``VERIFY_TOKENS`` tokens over the pool of ``whole``, which must have as many rows."""

    def __init__(self, backend: AttentionBackend, whole: AttentionStep, *, tree: bool) -> None:
        super().__init__(backend, static_verify_step(whole.case, whole, VERIFY_TOKENS, VERIFY_WIDTH, tree=tree))


def verify_step(
    base: AttentionCase, whole: AttentionStep, prefix: Sequence[int], trees: Sequence[Sequence[int]], tokens: int
) -> AttentionStep:
    """Return a step of verify rows over the pool of ``whole``, padded to ``tokens`` tokens and as many rows.

    The padding is rows of one query on page 0, and rows without a query. ``whole`` must have ``tokens`` rows.
    """
    real = [1 + len(parents) for parents in trees]
    fill, padding = tokens - sum(real), tokens - len(real)
    case = replace(
        base,
        prefix=[*prefix, *[0] * padding],
        extend=[*real, *[1] * fill, *[0] * (padding - fill)],
        trees=[*trees, *[[]] * padding],
        padding=padding,
    )
    return AttentionStep(case, whole.device, whole)


def static_verify_step(
    base: AttentionCase, whole: AttentionStep, tokens: int, width: int, *, tree: bool
) -> AttentionStep:
    """Return the step that is planned and captured for steps of ``tokens`` tokens, with at most ``width`` tokens in a
    row."""
    static = verify_step(base, whole, [], [], tokens)
    batch = static.batch
    batch.prefix_lens = np.full(tokens, whole.context().max_context - width, np.int32)
    batch.extend_lens = np.full(tokens, width, np.int32)
    if tree:
        batch.tree_mask = torch.zeros(tokens, width, dtype=torch.bool, device=whole.device)
    return static


def copy_inputs(source: AttentionStep, target: AttentionStep) -> None:
    """Copy the queries, lengths and tables of ``source`` to the tensors of ``target``, which keep their addresses."""
    given, batch = source.batch, target.batch
    for to, tensor in zip(_tensors(batch), _tensors(given), strict=True):
        to.copy_(tensor)
    target.q.copy_(source.q)
    batch.prefix_lens, batch.extend_lens = given.prefix_lens, given.extend_lens
    if batch.tree_mask is not None:
        assert given.drafts is not None
        mask = torch.from_numpy(make_tree_mask(given, given.drafts))
        batch.tree_mask.zero_()
        batch.tree_mask[:, : mask.shape[1]].copy_(mask)
    if batch.shared is not None and given.shared is not None:
        batch.shared.follow(given.shared)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    found = [batch.positions, batch.qo_indptr, batch.kv_lens, batch.page_table]
    if batch.shared is not None:
        shared = batch.shared
        found += [shared.indptr, shared.group_lens, shared.group_table, shared.own_lens]
        if shared.window is not None:
            found.append(shared.first_positions)
    return found

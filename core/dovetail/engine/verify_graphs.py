"""CUDA graphs of verify steps: rows with drafts, everything from the page table to the logits of every node.

A graph is captured for each of a ladder of token counts, for chains and for trees. A step runs in the smallest graph that
holds its tokens, however they are divided among rows (see ``verify_inputs``). Sampling and verification follow as usual.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.captures import Recorder, Staging, ladder
from dovetail.engine.inputs import Inputs, pack
from dovetail.engine.verify_inputs import (
    VerifyMemory,
    VerifyShape,
    VerifyTensors,
    empty_batch,
    set_lens,
    static_batch,
    verify_block,
)
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.memory.pool import PagedKVPool

log = logging.getLogger(__name__)


class VerifyKey(NamedTuple):
    """Tokens of a captured verify step, and whether drafts may be trees."""

    tokens: int
    tree: bool


class VerifySizes(NamedTuple):
    """What graphs of verify steps must hold: ``tokens`` in all, ``width`` of a row, ``trees`` or chains alone."""

    tokens: int
    width: int
    trees: bool
    context_len: int


class VerifyStep:
    """A verify step at fixed addresses: what a graph replays, and what runs without one just as well.

    The backend must have planned ``batch`` before ``run``.
    """

    def __init__(
        self, shape: VerifyShape, inputs: Inputs, memory: VerifyMemory, block: torch.Tensor, context_len: int
    ) -> None:
        """``block`` is where what the host sends arrives, see ``verify_block``."""
        self.shape, self._inputs = shape, inputs
        self._tensors = VerifyTensors(shape, memory, block)
        self.batch = static_batch(shape, context_len)
        self._tensors.give(self.batch, shape.tokens, shape.tokens)

    def run(self, model: ModelArchitecture) -> torch.Tensor:
        """Launch everything; returns the logits of every token."""
        self._tensors.compute(self._inputs)
        return model.logits(model.forward(self.batch))

    def set_lens(self, batch: Batch, tokens: int) -> None:
        """Tell the planned batch the lengths of this step of so many tokens, for ``AttentionBackend.plan_replay``."""
        set_lens(self.batch, batch, tokens)

    def give(self, batch: Batch, tokens: int) -> None:
        """Set the engine fields of ``batch``, so many tokens, which has been run."""
        self._tensors.give(batch, len(batch.slots), tokens)
        if self.batch.hidden is not None:
            batch.hidden = self.batch.hidden[:tokens]


class VerifyGraphs:
    """Captures and replays verify steps of one model on one attention backend. Not thread-safe."""

    def __init__(
        self,
        model: ModelArchitecture,
        inputs: Inputs,
        pool: PagedKVPool,
        backend: AttentionBackend,
        sizes: VerifySizes,
        watch: tuple[int, ...] = (),
    ) -> None:
        """Needs attention.verify_graph, and attention.tree_mask for trees. ``watch``: see ``Batch``."""
        self.sizes = ladder(sizes.tokens)
        self.seconds = 0.0  # spent on captures
        self.refused: set[VerifyKey] = set()
        self._model, self._inputs, self._pool, self._backend = model, inputs, pool, backend
        self._limits, self._watch = sizes, watch
        self._graphs: dict[VerifyKey, tuple[VerifyStep, torch.cuda.CUDAGraph]] = {}
        largest = VerifyShape(sizes.tokens, sizes.width, sizes.trees)
        self._memory = VerifyMemory(largest, inputs.pages.shape[1], inputs.device)
        self._staging = Staging(4 * sum(largest.sizes) + 8, inputs.device)
        self._recorder = Recorder(inputs.device)
        self._logits: torch.Tensor | None = None  # of the step launched last, whichever graph it ran in

    @property
    def num_captured(self) -> int:
        """Graphs there are now."""
        return len(self._graphs)

    def missing(self) -> Iterator[VerifyKey]:
        """The graphs that are still to be captured, the likeliest first."""
        kinds = (True, False) if self._limits.trees else (False,)
        wanted = (VerifyKey(tokens, tree) for tree in kinds for tokens in self.sizes)
        return (key for key in wanted if key not in self._graphs and key not in self.refused)

    def key_for(self, batch: Batch) -> VerifyKey | None:
        """The graph that a batch of verify rows needs; None if it is too large for any."""
        assert batch.drafts is not None
        total, tree = batch.num_tokens, not batch.drafts.is_chain
        if batch.drafts.token_ids.shape[1] >= self._limits.width or (tree and not self._limits.trees):
            return None
        tokens = next((size for size in self.sizes if size >= total), None)
        return None if tokens is None else VerifyKey(tokens, tree)

    def is_captured(self, key: VerifyKey) -> bool:
        """True if the graph can be replayed at once."""
        return key in self._graphs

    def launch(self, key: VerifyKey, batch: Batch) -> torch.Tensor:
        """Replay the forward pass for ``batch``, and set its engine fields; returns the logits of its tokens, ``[tokens, V]``.
        All of them are valid until the next launch."""
        step, graph = self._graphs[key]
        self._inputs.note(batch.page_updates)
        self._staging.send_step(self._inputs, [verify_block(batch, step.shape)], batch.page_updates)
        tokens = batch.num_tokens
        step.set_lens(batch, tokens)
        self._backend.plan_replay(step.batch)
        graph.replay()
        step.give(batch, tokens)
        assert self._logits is not None
        return self._logits[:tokens]

    @torch.inference_mode()
    def capture(self, key: VerifyKey) -> None:
        """Capture a step. Takes a fraction of a second."""
        start = time.perf_counter()
        limits = self._limits
        shape = VerifyShape(key.tokens, limits.width, key.tree)
        block = self._staging.buffer[: 4 * sum(shape.sizes)].view(torch.int32)
        step = VerifyStep(shape, self._inputs, self._memory, block, limits.context_len)
        step.batch.attn, step.batch.kv, step.batch.watch = (self._backend,), (self._pool,), self._watch
        self._backend.plan_capture(step.batch)
        self._staging.send(pack([verify_block(empty_batch(), shape)]))
        graph, _ = self._recorder.record(lambda: self._keep(step.run(self._model)))
        self._graphs[key] = step, graph
        self.seconds += time.perf_counter() - start
        log.debug("captured a verify step, %s: %.2f s", key, time.perf_counter() - start)

    def _keep(self, logits: torch.Tensor) -> torch.Tensor:
        """Copy logits to memory that all graphs share: there are as many of a verify step as of a large decode step."""
        if self._logits is None:
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

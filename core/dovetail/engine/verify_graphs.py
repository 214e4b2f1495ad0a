"""CUDA graphs of verify steps: rows with drafts, everything from the page table to the logits of every node, and, where
rows want filters and random numbers at most, to the tokens that were accepted.

A graph is captured for each of a ladder of token counts, for chains and for trees. A step runs in the smallest graph that
holds its tokens, however they are divided among rows (see ``verify_inputs``). The host waits for each verify step before it
drafts the next, and little else lies between two: it writes into memory that the device reads itself, replays, and finds
the accepted tokens in its own memory.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.captures import Recorder, ladder
from dovetail.engine.sampler_graphs import SamplerGraphs
from dovetail.engine.settings import expand
from dovetail.engine.verify import Accepted
from dovetail.engine.verify_inputs import (
    VerifyMemory,
    VerifyShape,
    VerifyTensors,
    empty_batch,
    set_lens,
    static_batch,
)
from dovetail.ops.sampling import greedy, sample
from dovetail.types import Batch, ForwardOutput

if TYPE_CHECKING:
    from dovetail.engine.inputs import Inputs
    from dovetail.engine.settings import RowSettings
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.memory.pool import PagedKVPool
    from dovetail.ops.random import Floats
    from dovetail.ops.sampling import Filters

log = logging.getLogger(__name__)

OWN_LOGITS = 32
"""Tokens up to which each graph has logits of its own: copying them to memory that graphs share takes microseconds, which count
where a step is short. Of a vocabulary of 128,256 they take 25 MB for chains, all graphs up to 256 tokens would take 0.8 GB."""


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

    @property
    def counts(self) -> list[int]:
        """The token counts to capture: a ladder, with one row that has all its drafts, as that is the commonest."""
        return sorted({*ladder(self.tokens), min(self.width, self.tokens)})


class VerifyStep:
    """A verify step at fixed addresses: what a graph replays, and what runs without one just as well.

    The backend must have planned ``batch`` before ``run``.
    """

    def __init__(self, shape: VerifyShape, inputs: Inputs, memory: VerifyMemory, context_len: int) -> None:
        self._inputs = inputs
        self.tensors = VerifyTensors(shape, memory)
        self.batch = static_batch(shape, context_len)
        self._lens = -1, -1  # rows and tokens of the batch whose lengths it has
        self.tensors.give(self.batch, shape.tokens, shape.tokens)

    def write(self, batch: Batch, tokens: int, numbers: Floats | None = None) -> None:
        """Write what the host sends of ``batch``, so many tokens, and tell the planned batch its lengths, for
        ``AttentionBackend.plan_replay``."""
        self.tensors.write(batch, self._inputs, numbers)
        rows = len(batch.slots)
        if (rows, tokens) == self._lens:
            self.batch.prefix_lens[:rows], self.batch.extend_lens[:rows] = batch.prefix_lens, batch.extend_lens
        else:
            set_lens(self.batch, batch, tokens)
            self._lens = rows, tokens

    def run(self, model: ModelArchitecture) -> torch.Tensor:
        """Launch everything; returns the logits of every token."""
        self.tensors.compute(self._inputs)
        return model.logits(model.forward(self.batch))

    def draw(self, logits: torch.Tensor, filters: Filters | None) -> torch.Tensor:
        """Sample at every token and verify the drafts; the last tokens are those of their slots from now on. ``filters`` are by
        row. Returns the memory of ``Accepted.of``, on the device."""
        from dovetail.ops.triton.verify import walk

        own = self.tensors
        sampled = greedy(logits) if filters is None else sample(logits, expand(filters, own.row_of), own.uniform)
        keep = own.slots, self._inputs.last_token
        walk(sampled, own.indptr, own.drafts, own.parents, own.result, on_host=own.result_on_host, keep=keep)
        return own.result

    def give(self, batch: Batch, tokens: int) -> None:
        """Set the engine fields of ``batch``, which has ``tokens`` tokens and was run, to views of the step's tensors: see
        ``Runner.launch``."""
        static = self.batch
        batch.hidden = None if static.hidden is None else static.hidden[:tokens]
        batch.attn, batch.kv, batch.watch = static.attn, static.kv, static.watch
        self.tensors.give(batch, len(batch.slots), tokens)

    def output(self, rows: int) -> ForwardOutput:
        """What ``draw`` found for so many rows. Valid until the next one."""
        on_host, result = (Accepted.of(r[:rows]) for r in (self.tensors.result_on_host, self.tensors.result))
        return ForwardOutput(*result, on_host=ForwardOutput(*on_host))


class Captured(NamedTuple):
    """A step with its graph, and where that leaves the logits of every token."""

    step: VerifyStep
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor


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
        self.sizes = sizes.counts
        self.seconds = 0.0  # spent on captures
        self.refused: set[VerifyKey] = set()
        self._model, self._inputs, self._pool, self._backend = model, inputs, pool, backend
        self._limits, self._watch = sizes, watch
        self._graphs: dict[VerifyKey, Captured] = {}
        largest = VerifyShape(sizes.tokens, sizes.width, sizes.trees)
        self._memory = VerifyMemory(largest, inputs.pages.shape[1], inputs.device)
        self._recorder = Recorder(inputs.device)
        self._samplers = SamplerGraphs(sizes.tokens, self._recorder, inputs.device)
        self._unread: Batch | None = None  # which the host wrote, and the device may not have read
        self._logits: torch.Tensor | None = None  # of all steps of more than OWN_LOGITS tokens

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
        at = bisect_left(self.sizes, total)
        return VerifyKey(self.sizes[at], tree) if at < len(self.sizes) else None

    def is_captured(self, key: VerifyKey) -> bool:
        """True if the graph can be replayed at once."""
        return key in self._graphs

    def launch(self, key: VerifyKey, batch: Batch, numbers: Floats | None) -> torch.Tensor:
        """Replay the forward pass for ``batch``, and set its engine fields; returns the logits of its tokens, ``[tokens, V]``.
        All of them are valid until the next launch. ``numbers`` are those of ``verify_numbers``."""
        step, graph, logits = self._graphs[key]
        tokens = batch.num_tokens
        self._inputs.locate_updates(batch.page_updates)
        self._wait_until_read()
        self._unread = batch
        step.write(batch, tokens, numbers)
        self._backend.plan_replay(step.batch)
        graph.replay()
        step.give(batch, tokens)
        return logits[:tokens]

    def computed(self, batch: Batch) -> None:
        """The host has waited for a step, so that the device need not be asked whether it has read what the step was sent."""
        if batch is self._unread:
            self._unread = None

    def sample(self, key: VerifyKey, batch: Batch, settings: RowSettings) -> ForwardOutput | None:
        """Replay the sampler of the step just launched, and the verification, with its result on the host's side as well.
        Valid until the next launch. None while the sampler has not been needed often."""
        step, _, logits = self._graphs[key]
        found = self._samplers.replay(key, key.tokens, settings, lambda filters: step.draw(logits, filters))
        return None if found is None else step.output(len(batch.slots))

    def _wait_until_read(self) -> None:
        if self._unread is not None:
            self._recorder.wait()

    @torch.inference_mode()
    def capture(self, key: VerifyKey) -> None:
        """Capture a step. Takes a fraction of a second."""
        start = time.perf_counter()
        limits = self._limits
        shape = VerifyShape(key.tokens, limits.width, key.tree)
        step = VerifyStep(shape, self._inputs, self._memory, limits.context_len)
        step.batch.attn, step.batch.kv, step.batch.watch = (self._backend,), (self._pool,), self._watch
        self._backend.plan_capture(step.batch)
        self._wait_until_read()
        step.tensors.write(empty_batch(), self._inputs)
        self._unread = step.batch
        graph, logits = self._recorder.record(lambda: self._kept(step.run(self._model)))
        self._graphs[key] = Captured(step, graph, logits)
        self.seconds += time.perf_counter() - start
        log.debug("captured a verify step, %s: %.2f s", key, time.perf_counter() - start)

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits where they stay until the next launch: of many tokens in memory that graphs share."""
        if len(logits) <= OWN_LOGITS:
            return logits
        if self._logits is None:
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

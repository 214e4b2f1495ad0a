"""Capture and replay verify steps (rows with drafts) as CUDA graphs. A graph holds everything from the page table to
the logits of every node. A second graph samples and verifies, if no row needs more than filters and random numbers.

A graph is captured for each number of tokens of a ladder, for chains and for trees. A step runs in the smallest graph
that holds its tokens; it does not matter how they are divided among rows (see ``verify_inputs``). The host waits for
each verify step before it drafts for the next one, so it does little work between two steps: it writes into pinned
memory that the device reads directly, replays the graph, and reads the accepted tokens from pinned memory that the
device has written.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch

from dovetail.engine.captures import GraphRecorder, ladder, larger_sizes
from dovetail.engine.draft_layout import wide_shape
from dovetail.engine.dry_run import every_filter, first_layers, prompts
from dovetail.engine.grouped import backends_of, mixer_of, pools_of, states_of
from dovetail.engine.outputs import step_result
from dovetail.engine.own_verify import OwnVerifyRows, OwnVerifyStep
from dovetail.engine.sampler_graphs import SamplerGraphs
from dovetail.engine.settings import expand
from dovetail.engine.states import capture_states, draft_rows, replay_states
from dovetail.engine.verify import Accepted
from dovetail.engine.verify_inputs import (
    VerifyMemory,
    VerifyShape,
    VerifyTensors,
    empty_batch,
    set_lens,
    static_batch,
)
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.layers.states import StepStates
from dovetail.ops.sampling import Filters, greedy, sample
from dovetail.ops.transfer import to_device
from dovetail.types import Batch, ForwardOutput, StepResult

if TYPE_CHECKING:
    from dovetail.engine.expert_load import ExpertLoad
    from dovetail.engine.grouped import Pools
    from dovetail.engine.inputs import Inputs
    from dovetail.engine.settings import RowSettings
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.ops.random import Floats

log = logging.getLogger(__name__)

OWN_LOGITS = 32
"""The number of tokens up to which each graph has its own logits. Larger graphs copy their logits to memory that they
share. This copy takes microseconds, which matters only in short steps. With a vocabulary of 128,256 tokens, the logits
of the small graphs take 25 MB for chains; if all graphs up to 256 tokens had their own logits, these would take 0.8
GB."""


class VerifyKey(NamedTuple):
    """Identify a captured verify step by its number of tokens, by whether drafts may be trees, and, with data-parallel
    attention, by the level of its own tokens, an index in ``OwnVerifyRows.levels``."""

    tokens: int
    tree: bool
    own: int = 0


class VerifySizes(NamedTuple):
    """Describe what graphs of verify steps must hold: at most ``tokens`` tokens in a step, ``width`` tokens in a row
    and ``context_len`` tokens in a request. With ``trees``, drafts may be trees; otherwise they are chains."""

    tokens: int
    width: int
    trees: bool
    context_len: int

    @property
    def counts(self) -> list[int]:
        """Return the numbers of tokens to capture: a ladder, and the number of tokens of one row with all its drafts,
        because steps of that size are the most common."""
        return sorted({*ladder(self.tokens), min(self.width, self.tokens)})


class VerifyStep:
    """Run a verify step whose tensors have fixed addresses, in a graph or without one.

    The backend must have planned ``attending`` before ``run``: the batch, or with data-parallel attention its ``own`` rows.
    """

    def __init__(
        self,
        shape: VerifyShape,
        inputs: Inputs,
        memory: VerifyMemory,
        context_len: int,
        own: OwnVerifyStep | None = None,
    ) -> None:
        self._inputs, self._own = inputs, own
        self.tensors = VerifyTensors(shape, memory)
        self.batch = static_batch(shape, context_len)
        self.states: tuple[StepStates, ...] = ()  # those of ``batch.attn``
        self._lens = -1, -1  # rows and tokens of the step whose lengths ``batch`` has
        self._views: dict[int, tuple[Accepted, ForwardOutput, StepResult]] = {}  # of the result, by rows
        self.tensors.give(self.batch, shape.tokens, shape.tokens)
        self.batch.own = None if own is None else own.rows

    @property
    def attending(self) -> Batch:
        """Return the batch whose attention is planned."""
        return self.batch if self._own is None else self._own.batch

    def write(self, batch: Batch, tokens: int, numbers: Floats | None = None) -> None:
        """Write what the host sends for ``batch``, which has ``tokens`` tokens, and set the host lengths of the planned
        batch, which ``AttentionBackend.plan_replay`` reads."""
        self.tensors.write(batch, self._inputs, numbers)
        rows = len(batch.slots)
        if (rows, tokens) == self._lens:
            self.batch.prefix_lens[:rows], self.batch.extend_lens[:rows] = batch.prefix_lens, batch.extend_lens
        else:
            set_lens(self.batch, batch, tokens)
            self._lens = rows, tokens
        if self._own is not None:
            self._own.write(batch)

    def write_padding(self) -> None:
        """Write a step in which every token is padding. The host lengths of the planned batch stay the largest."""
        self.tensors.write(empty_batch(), self._inputs)
        if self._own is not None:
            self._own.write_padding()

    def run(self, model: ModelArchitecture, load: ExpertLoad | None = None) -> torch.Tensor:
        """Launch the kernels that fill the inputs and the forward pass. Return the logits of every token. ``load`` counts
        the tokens of experts."""
        self.compute()
        for states in self.states:
            states.kept.clear()
        hidden = model.forward(self.batch)
        if load is not None:
            load.add(self.batch)
        return model.logits(hidden)

    def compute(self) -> None:
        """Launch the kernels that fill the inputs."""
        self.tensors.compute(self._inputs)
        if self._own is not None:
            self._own.compute()

    @property
    def _keeping(self) -> VerifyTensors:
        """Return the tensors of the rows whose states this rank keeps."""
        return self.tensors if self._own is None else self._own.tensors

    def attend(self, backend: AttentionBackend, pool: Pools) -> None:
        """Set what the layers of the step attend and keep states with."""
        rows = [draft_rows(slots, self._keeping.indptr) for slots in self._keeping.state_slots]
        self.states = tuple(
            StepStates(own.memory, None, drafts.slots[:0], drafts, mixer_of(pool))
            for own, drafts in zip(states_of(pool), rows, strict=True)
        )
        self.batch.attn, self.batch.kv = (*backends_of(backend), *self.states), pools_of(pool)
        self.attending.attn, self.attending.kv = self.batch.attn, self.batch.kv

    def advance(self) -> torch.Tensor:
        """Write the states after the accepted drafts, whose numbers ``accept`` has set, and return these."""
        for states in self.states:
            states.advance(self._keeping.accept_lens)
        return self._keeping.accept_lens

    def accept(self, lens: torch.Tensor | None) -> None:
        """Set the number of new tokens of each row of the step that was written last, int ``[rows]``; None: no token of any row."""
        accepted = self._keeping.accept_lens
        accepted.zero_()
        if lens is None:
            return
        if self._own is not None:
            lens = lens.index_select(0, to_device(self._own.mine, lens.device))
        accepted[: len(lens)] = lens

    def draw(self, logits: torch.Tensor, filters: Filters | None) -> torch.Tensor:
        """Sample at every token, verify the drafts, and keep the last token of each slot for the next step. ``filters``
        has one entry for each row. Return the device tensor that ``Accepted.of`` reads; the same result is written to
        pinned memory."""
        from dovetail.ops.triton.verify import walk

        own = self.tensors
        sampled = greedy(logits) if filters is None else sample(logits, expand(filters, own.row_of), own.uniform)
        keep = own.slots, self._inputs.last_token
        walk(sampled, own.indptr, own.drafts, own.parents, own.result, on_host=own.result_on_host, keep=keep)
        return own.result

    def give(self, batch: Batch, tokens: int) -> None:
        """Set the engine fields of ``batch``, whose step of ``tokens`` tokens was run, to views of the step's tensors
        (see ``Runner.launch``)."""
        static = self.batch
        batch.hidden = None if static.hidden is None else static.hidden[:tokens]
        batch.attn, batch.kv, batch.watch = static.attn, static.kv, static.watch
        self.tensors.give(batch, len(batch.slots), tokens)

    def output(self, rows: int) -> ForwardOutput:
        """Return the result of ``draw`` for the first ``rows`` rows. It is valid until the next call of ``draw``. The
        views are kept for later steps of the same number of rows."""
        views = self._views.get(rows)
        if views is None:
            own = self.tensors
            on_host = ForwardOutput(*Accepted.of(own.result_on_host[:rows]))
            views = self._views[rows] = Accepted.of(own.result[:rows]), on_host, step_result(on_host)
        accepted, on_host, result = views
        return ForwardOutput(*accepted, on_host=on_host, result=result)


class CapturedVerify(NamedTuple):
    """Hold a step, its graph, and the tensor in which the graph leaves the logits of every token. ``advance`` is the graph
    that writes states after acceptance, in a model that keeps states."""

    step: VerifyStep
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    advance: torch.cuda.CUDAGraph | None = None


class VerifyGraphs:
    """Capture and replay verify steps of one model on one attention backend. Not thread-safe."""

    def __init__(
        self,
        model: ModelArchitecture,
        inputs: Inputs,
        pool: Pools,
        backend: AttentionBackend,
        sizes: VerifySizes,
        watch: tuple[int, ...] = (),
        mesh: Mesh = SINGLE,
        load: ExpertLoad | None = None,
    ) -> None:
        """``backend`` must offer attention.verify_graph, and attention.tree_mask for trees. ``watch`` is
        ``Batch.watch``. ``load`` counts the tokens of experts."""
        self.sizes = sizes.counts
        self.seconds = 0.0  # spent on captures
        self.refused: set[VerifyKey] = set()
        self._model, self._inputs, self._pool, self._backend = model, inputs, pool, backend
        self._limits, self._watch, self._load = sizes, watch, load
        self._graphs: dict[VerifyKey, CapturedVerify] = {}
        largest = VerifyShape(sizes.tokens, sizes.width, sizes.trees)
        groups = len(inputs.other_pages), len(states_of(pool))
        self._memory = VerifyMemory(largest, inputs.pages.shape[1], inputs.device, *groups)
        self._own = OwnVerifyRows.of(mesh, inputs, largest, self.sizes)
        self._own_levels = [0]  # those that have occurred in batches
        self._recorder = GraphRecorder(inputs.device, mesh)
        self._samplers = SamplerGraphs(sizes.tokens, self._recorder, inputs.device)
        self._unread: Batch | None = None  # the batch that was written last, if the device may not have read it
        self._logits: torch.Tensor | None = None  # shared by all graphs of more than OWN_LOGITS tokens

    @property
    def num_captured(self) -> int:
        """Return the number of graphs that exist now."""
        return len(self._graphs)

    def missing(self) -> Iterator[VerifyKey]:
        """Return the keys that are not captured yet, in the order in which they are captured: trees before chains, then
        few tokens before many."""
        kinds = (True, False) if self._limits.trees else (False,)
        keys = (
            VerifyKey(tokens, tree, own)
            for own in self._own_levels
            for tree in kinds
            for tokens in self.sizes
            if own < len(self._own_counts(tokens))
        )
        return (key for key in keys if key not in self._graphs and key not in self.refused)

    def larger(self, key: VerifyKey) -> Iterator[VerifyKey]:
        """See ``Captures``."""
        if self._own is None:
            return (key._replace(tokens=tokens) for tokens in larger_sizes(self.sizes, key.tokens))
        least, sizes = self._own_counts(key.tokens)[key.own], (key.tokens, *larger_sizes(self.sizes, key.tokens))
        found = (
            key._replace(tokens=tokens, own=own)
            for tokens in sizes
            for own, count in enumerate(self._own_counts(tokens))
            if count >= least
        )
        return (larger for larger in found if larger != key)

    def key_for(self, batch: Batch) -> VerifyKey | None:
        """Return the key of the graph that a batch of verify rows needs, or None if the batch is too large for any
        graph."""
        assert batch.drafts is not None
        total, tree = batch.num_tokens, not batch.drafts.is_chain
        if batch.drafts.token_ids.shape[1] >= self._limits.width or (tree and not self._limits.trees):
            return None
        at = bisect_left(self.sizes, total)
        if at == len(self.sizes):
            return None
        if self._own is None:
            return VerifyKey(self.sizes[at], tree)
        own = self._own.level_for(batch, self.sizes[at])
        if own not in self._own_levels:
            self._own_levels.append(own)
        return VerifyKey(self.sizes[at], tree, own)

    def _own_counts(self, tokens: int) -> list[int]:
        """Return the number of own tokens at each level of a step of ``tokens`` tokens, 0 if there are none."""
        return [0] if self._own is None else self._own.levels(tokens)

    def is_captured(self, key: VerifyKey) -> bool:
        """Return True if the graph exists."""
        return key in self._graphs

    def launch(self, key: VerifyKey, batch: Batch, numbers: Floats | None) -> torch.Tensor:
        """Replay the forward pass for ``batch`` and set its engine fields. Return the logits of its tokens,
        ``[tokens, V]``. Fields and logits are valid until the next launch. ``numbers`` is the result of
        ``verify_numbers``."""
        step, graph, logits, _ = self._graphs[key]
        tokens = batch.num_tokens
        self._inputs.locate_updates(batch.page_updates)
        self._wait_until_read()
        self._unread = batch
        step.write(batch, tokens, numbers)
        self._backend.plan_replay(step.attending)
        if step.states:
            replay_states(step.attending)
        graph.replay()
        step.give(batch, tokens)
        return logits[:tokens]

    def computed(self, batch: Batch) -> None:
        """Record that the host has waited for the step of ``batch``. The device has then read what was written for
        it."""
        if batch is self._unread:
            self._unread = None

    def sample(self, key: VerifyKey, batch: Batch, settings: RowSettings) -> ForwardOutput | None:
        """Replay sampling and verification of the step that was launched last. The result is also in host memory once
        the step has completed, and is valid until the next launch. If the sampler is not captured, do nothing and
        return None."""
        step, _, logits, _ = self._graphs[key]
        found = self._samplers.replay(key, key.tokens, settings, lambda sampling: step.draw(logits, sampling.filters))
        return None if found is None else step.output(len(batch.slots))

    def advance(self, key: VerifyKey, output: ForwardOutput) -> None:
        """Write the states after the accepted drafts of the step that was launched last, whose result is ``output``."""
        step, _, _, graph = self._graphs[key]
        if graph is not None and output.accept_lens is not None:
            step.accept(output.accept_lens)
            graph.replay()

    def _wait_until_read(self) -> None:
        if self._unread is not None:
            self._recorder.wait()

    @torch.inference_mode()
    def capture(self, key: VerifyKey) -> None:
        """Capture the step of ``key``. The host needs about the time in which it launches the step twice."""
        start = time.perf_counter()
        step = self._planned(key)
        self._wait_until_read()
        step.write_padding()
        self._unread = step.batch
        graph, logits = self._recorder.record(lambda: self._kept(step.run(self._model, self._load)))
        step.accept(None)
        advance = self._recorder.record(step.advance)[0] if step.states else None
        self._graphs[key] = CapturedVerify(step, graph, logits, advance)
        self.seconds += time.perf_counter() - start
        log.debug("captured a verify step, %s: %.2f s", key, time.perf_counter() - start)

    @torch.inference_mode()
    def rehearse(self, key: VerifyKey, layers: int, *, attend: bool = True) -> None:
        """Launch the kernels of the step of ``key``, of the first ``layers`` layers only, and those that sample and
        verify in the usual ways, in order to note them (see ``ops.triton.ahead``). With ``attend`` False, leave
        attention out."""
        step = self._planned(key, plan=attend)
        step.compute()
        logits = self._model.logits(first_layers(self._model, step.batch, layers, attend=attend))
        filters = every_filter(key.tokens, logits.device)
        for chosen in (None, Filters(filters.temperature), filters):
            step.draw(logits, chosen)

    @torch.inference_mode()
    def rehearse_uncaptured(self, layers: int, *, attend: bool = True) -> None:
        """Launch the kernels of a row with drafts that only those steps launch that run without a graph, because theirs
        is not captured yet or because they have prompts too, in order to note them: attention, and the walk through the
        drafts."""
        from dovetail.ops.triton.verify import walk

        width, trees = self._limits.width, self._limits.trees
        ids = torch.zeros(1, width - 1, dtype=torch.int32, device=self._inputs.device)
        for parents in (ids, None) if trees else (None,):
            batch = prompts(self._backend, self._pool, [width], plan=False)
            batch.num_extend, batch.drafts = 0, wide_shape(batch.extend_lens)
            if parents is not None:
                batch.tree_mask = torch.zeros(width, width, dtype=torch.bool, device=ids.device)
            if attend:
                self._backend.plan(batch)
                first_layers(self._model, batch, layers)
            walk(batch.input_ids, batch.qo_indptr, ids, parents, batch.input_ids.new_empty(1, 2 * width + 1))

    def _planned(self, key: VerifyKey, *, plan: bool = True) -> VerifyStep:
        """Return a step for ``key``. With ``plan``, attention is planned for it."""
        limits = self._limits
        shape = VerifyShape(key.tokens, limits.width, key.tree)
        own = None if self._own is None else self._own.step(key.tokens, key.own, limits.context_len, tree=key.tree)
        step = VerifyStep(shape, self._inputs, self._memory, limits.context_len, own)
        step.attend(self._backend, self._pool)
        step.batch.watch = self._watch
        if plan:
            self._backend.plan_capture(step.attending)
            capture_states(step.attending)
        return step

    def _kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits in memory that keeps them until the next launch. Large graphs copy them to memory that they
        share."""
        if len(logits) <= OWN_LOGITS:
            return logits
        if self._logits is None:
            self._logits = logits.new_empty(self.sizes[-1], logits.shape[1])
        return self._logits[: len(logits)].copy_(logits)

"""Capture and replay decode steps as CUDA graphs. A graph holds everything from the page table to the logits; a second
graph, of the sampler, follows it.

A graph is captured for each number of rows of a ladder, for steps with and without shared prefixes. A step runs in the
smallest graph that holds its rows. The graph's other rows are padding: they belong to slot 0, read page 0 and write to
page 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from dovetail.engine.captures import NO_UPDATES, GraphRecorder, Staging, ladder
from dovetail.engine.dry_run import first_layers, representative_layers
from dovetail.engine.graph_keys import GraphKey, GraphKeys
from dovetail.engine.grouped import backends_of, mixer_of, pools_of, states_of
from dovetail.engine.inputs import DecodeTensors, Inputs, decode_arrays, pack, unpack
from dovetail.engine.own_graphs import OwnRowsOfGraphs
from dovetail.engine.sampler_graphs import SamplerGraphs, Sampling
from dovetail.engine.states import capture_states, replay_states
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.layers.states import StepStates
from dovetail.types import Batch, ForwardOutput

if TYPE_CHECKING:
    from dovetail.engine.adapters import EngineAdapters
    from dovetail.engine.expert_load import ExpertLoad
    from dovetail.engine.grouped import Pools
    from dovetail.engine.inputs import Array
    from dovetail.engine.penalties import TokenCounts
    from dovetail.engine.settings import RowSettings
    from dovetail.engine.sharing import PrefixSharing
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class DecodeGraph:
    """Hold one captured step. ``batch`` has the host lengths of the step that is being replayed, and tensors of fixed
    address. With data-parallel attention, the step has ``own`` rows of this rank."""

    rows: int
    batch: Batch
    tensors: DecodeTensors
    forward: torch.cuda.CUDAGraph
    logits: torch.Tensor
    own: int = 0
    _views: dict[int, _Views] = field(default_factory=dict)  # by the number of rows that are not padding

    def give(self, batch: Batch) -> torch.Tensor:
        """Set the engine fields of ``batch``, whose step was replayed, to views of the graph's tensors (see
        ``Runner.launch``). Return its logits."""
        rows = len(batch.slots)
        views = self._views.get(rows)
        if views is None:
            hidden = self.batch.hidden
            views = _Views(self.tensors.narrow(rows), self.logits[:rows], None if hidden is None else hidden[:rows])
            self._views[rows] = views
        tensors, logits, batch.hidden = views
        tensors.give(batch)
        batch.attn, batch.kv, batch.watch = self.batch.attn, self.batch.kv, self.batch.watch
        return logits


class _Views(NamedTuple):
    """Hold views of a graph's tensors for the rows of a step that are not padding."""

    tensors: DecodeTensors
    logits: torch.Tensor
    hidden: torch.Tensor | None


class DecodeGraphs:
    """Capture and replay decode steps of one model on one attention backend. Not thread-safe."""

    def __init__(
        self,
        model: ModelArchitecture,
        inputs: Inputs,
        pool: Pools,
        backend: AttentionBackend,
        max_rows: int,
        context_len: int,
        sharing: PrefixSharing,
        watch: tuple[int, ...] = (),
        *,
        counts: TokenCounts,
        mesh: Mesh = SINGLE,
        load: ExpertLoad | None = None,
        adapters: EngineAdapters | None = None,
    ) -> None:
        """Batches may have ``shared`` as ``sharing`` allows. ``watch``
        is ``Batch.watch``, ``counts`` the token counts that penalties read. ``load`` counts the tokens of experts.
        Batches may have ``adapters`` if these are given."""
        self._adapters = adapters
        self.sizes = ladder(max_rows)
        self.seconds = 0.0  # spent on captures
        self._model, self._inputs, self._pool, self._backend = model, inputs, pool, backend
        self._context_len, self._watch, self._load = context_len, watch, load
        self._loading_layers = representative_layers(model)
        self.refused: set[GraphKey] = set()
        self.loaded: set[GraphKey] = set()  # keys whose kernels are loaded onto the device
        self._graphs: dict[GraphKey, DecodeGraph] = {}
        device = inputs.device
        self._sharing, state_groups = sharing, len(states_of(pool))
        self._keeps_states = state_groups > 0
        may_share = [sharing.may_share(group) for group in range(1 + len(inputs.other_pages))]
        self._tensors = DecodeTensors(max_rows, inputs.pages.shape[1], device, may_share, state_groups)
        self._own = OwnRowsOfGraphs.of(mesh, inputs, self.sizes)
        self._keys = GraphKeys(
            self.sizes, shared=sharing.levels, adapters=adapters, own=self._own, has_variant=backend.has_variant
        )
        self.shared = self._keys.shared
        largest = GraphKey(max_rows, shared=0, own=-1)
        self._staging = Staging(len(pack(self._padding(largest))), device)
        self._recorder = GraphRecorder(device, mesh)
        self._counts = counts
        self._samplers = SamplerGraphs(max_rows, self._recorder, device, counts)

    @property
    def num_captured(self) -> int:
        """Return the number of graphs that exist now."""
        return len(self._graphs)

    def missing(self) -> Iterator[GraphKey]:
        """Return the keys that are not captured yet, in the order of ``GraphKeys.possible``, in which they are captured."""
        return (key for key in self._keys.possible() if key not in self._graphs and key not in self.refused)

    def larger(self, key: GraphKey) -> Iterator[GraphKey]:
        """See ``Captures``."""
        return self._keys.larger(key)

    def graph_has_variant(self, variant: int, size: int) -> bool:
        """See ``GraphKeys``."""
        return self._keys.graph_has_variant(variant, size)

    def key_for(self, batch: Batch) -> GraphKey | None:
        """See ``GraphKeys``."""
        return self._keys.key_for(batch)

    def is_captured(self, key: GraphKey) -> bool:
        """Return True if the graph exists."""
        return key in self._graphs

    def get(self, key: GraphKey) -> DecodeGraph:
        """Return a captured graph."""
        return self._graphs[key]

    def launch(self, graph: DecodeGraph, batch: Batch, uniform: Array | None) -> torch.Tensor:
        """Replay the forward pass for ``batch`` and set its engine fields. Return its logits
        ``[rows of the batch, V]``, valid until the next launch."""
        arrays = decode_arrays(batch, graph.rows, uniform)
        if self._own is not None:
            arrays += self._own.arrays(batch, graph.rows, graph.own)
        self._staging.send_step(self._inputs, arrays, batch.page_updates)
        static, real = graph.batch, len(batch.slots)
        static.prefix_lens[:real], static.prefix_lens[real:] = batch.prefix_lens, 0
        if batch.shared is not None and static.shared is not None:
            static.shared.follow(batch.shared)
        if batch.adapters is not None and self._adapters is not None:
            self._adapters.send(batch)
        attends = static if self._own is None else self._own.follow(static, batch)
        self._backend.plan_replay(attends)
        if self._keeps_states:
            replay_states(attends)
        graph.forward.replay()
        return graph.give(batch)

    def sample(self, graph: DecodeGraph, rows: int, settings: RowSettings) -> ForwardOutput | None:
        """Replay the sampler of the step that was launched last, which has ``rows`` rows. Return its output, which is
        valid until the next sample, and keep the tokens on the device as the last tokens of their slots. If the sampler
        is not captured yet, do nothing and return None."""
        logits, tensors, last_token = graph.logits, graph.tensors, self._inputs.last_token

        def draw(sampling: Sampling) -> torch.Tensor:
            tokens = sampling.draw(logits, tensors.slots, tensors.prefix_lens, tensors.uniform, self._counts)
            last_token.index_copy_(0, tensors.slots, tokens)
            return tokens

        tokens = self._samplers.replay(graph, graph.rows, settings, draw)
        if tokens is None:
            return None
        output = ForwardOutput(tokens[:rows, None])
        if settings.logprobs:
            output.logprobs = self._samplers.logprobs(rows, settings)
            output.logprob_start = {row: row for row in settings.logprobs}
        return output

    @torch.inference_mode()
    def capture(self, key: GraphKey) -> DecodeGraph:
        """Capture the step of ``key`` and return its graph. The host needs little more than the time in which it launches the
        step if the first layers have all kernels of the model (``representative_layers``): then only they run before the capture."""
        start = time.perf_counter()
        batch, tensors, own = self._planned(key)

        def step() -> torch.Tensor:
            tensors.compute(self._inputs, batch.shared)
            if own is not None:
                own.compute(self._inputs, None)
            hidden = self._model.forward(batch)
            if self._load is not None:
                self._load.add(batch)
            return self._model.logits(hidden)

        load = None  # the whole step, also if ``self._load`` counts the experts of all layers
        if self._load is None and self._loading_layers is not None:
            load = partial(self._first_layers, batch, tensors, own, self._loading_layers)
        self._staging.send(pack(self._padding(key)))
        with self._with_adapters(key):
            forward, logits = self._recorder.record(step, load, loaded=key in self.loaded)
        graph = self._graphs[key] = DecodeGraph(
            key.rows, batch, tensors, forward, logits, self._keys.own_counts(key.rows)[key.own]
        )
        self.seconds += time.perf_counter() - start
        log.debug("captured a decode step, %s: %.3f s", key, time.perf_counter() - start)
        return graph

    @torch.inference_mode()
    def rehearse(self, key: GraphKey, layers: int, *, attend: bool = True) -> torch.Tensor:
        """Launch the kernels of the step of ``key``, of the first ``layers`` layers only, in order to note or to load
        them (see ``ops.triton.ahead``). Return the logits, whose values are undefined. The inputs of the step are those
        of the last step of this kind. With ``attend`` False, leave attention out."""
        batch, tensors, own = self._planned(key, plan=attend)
        with self._with_adapters(key):
            return self._first_layers(batch, tensors, own, layers, attend=attend)

    def _first_layers(
        self, batch: Batch, tensors: DecodeTensors, own: DecodeTensors | None, layers: int, *, attend: bool = True
    ) -> torch.Tensor:
        tensors.compute(self._inputs, batch.shared)
        if own is not None:
            own.compute(self._inputs, None)
        return self._model.logits(first_layers(self._model, batch, layers, attend=attend))

    def _with_adapters(self, key: GraphKey) -> AbstractContextManager[None]:
        """Let the layers compute the adapters that ``EngineAdapters.send`` sends, if rows of ``key`` may have adapters."""
        if self._adapters is None:
            return nullcontext()
        return self._adapters.captured(key.rows, key.adapters, self._keys.own_counts(key.rows)[key.own])

    def _planned(self, key: GraphKey, *, plan: bool = True) -> tuple[Batch, DecodeTensors, DecodeTensors | None]:
        """Return the batch of ``key``, its tensors, and those of its own rows. With ``plan``, attention is planned for it."""
        tensors, own = self._tensors.narrow(key.rows), None
        first = len(_padding(key.rows))
        sent = unpack(self._staging.buffer, self._padding(key))
        tensors.read(sent[:first])
        batch = attends = self._static_batch(key, tensors)
        if self._own is not None:
            count = self._keys.own_counts(key.rows)[key.own]
            own = self._own.tensors(sent[first:], count)
            attends = self._static_batch(key._replace(rows=count), own)
            batch.own = self._own.of_graph(attends, sent[first:])
        if plan:
            self._backend.plan_capture(attends)
            capture_states(attends)
        return batch, tensors, own

    def _padding(self, key: GraphKey) -> tuple[Array, ...]:
        """Return the arrays of a step of ``key`` in which every row is padding."""
        if self._own is None:
            return _padding(key.rows)
        return _padding(key.rows) + self._own.padding(key.rows, self._keys.own_counts(key.rows)[key.own])

    def _static_batch(self, key: GraphKey, tensors: DecodeTensors) -> Batch:
        rows, shared, variant, *_ = key
        longest = np.full(rows, self._context_len - 1, np.int32)
        batch = Batch(
            reqs=[],
            num_extend=0,
            slots=np.zeros(rows, np.int32),
            prefix_lens=longest,
            extend_lens=np.ones(rows, np.int32),
            samples=np.ones(rows, np.bool_),
            page_updates=NO_UPDATES,
            shared=self._sharing.at(shared, np.arange(rows + 1, dtype=np.int32), np.zeros(rows, np.int32), longest),
            variant=variant,
        )
        tensors.give(batch)
        stores = zip(states_of(self._pool), tensors.state_slots, strict=True)
        states = (StepStates(own.memory, None, slots, backend=mixer_of(self._pool)) for own, slots in stores)
        batch.attn = (*backends_of(self._backend), *states)
        batch.kv, batch.watch = pools_of(self._pool), self._watch
        return batch


def _padding(rows: int) -> tuple[Array, ...]:
    """Return the arrays of a step in which every row is padding."""
    nothing = np.zeros(0, np.int32)
    batch = Batch([], 0, nothing, nothing, nothing, nothing.astype(np.bool_), NO_UPDATES)
    return decode_arrays(batch, rows)

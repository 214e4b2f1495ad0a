"""Run the steps of an engine. There are three runners: for captured decode steps, for captured verify steps, and for
steps that are launched kernel by kernel.

Each runner has the same three methods. The engine gives a batch to the first runner that can run it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from dovetail.engine.captures import CaptureOnDemand
from dovetail.engine.grouped import backends_of, pools_of
from dovetail.engine.last import last_rows, narrows
from dovetail.engine.node_rows import NodeRows
from dovetail.engine.own_rows import kept
from dovetail.engine.pieces import PIECES_NEEDED
from dovetail.engine.pooling import pooled
from dovetail.engine.prompt_logprobs import prompt_logprobs
from dovetail.engine.row_logits import RowLogits
from dovetail.engine.sampler import decode_numbers, verify_numbers
from dovetail.engine.states import advance_states
from dovetail.interfaces.attention import AttentionBackend
from dovetail.interfaces.features import Feature
from dovetail.ops.transfer import to_device
from dovetail.types import ForwardOutput

if TYPE_CHECKING:
    import torch

    from dovetail.engine.adapters import EngineAdapters
    from dovetail.engine.expansion import Expansion
    from dovetail.engine.expert_load import ExpertLoad
    from dovetail.engine.graphs import DecodeGraph, DecodeGraphs
    from dovetail.engine.grouped import Pools
    from dovetail.engine.inputs import Inputs
    from dovetail.engine.own_rows import OwnRowsOfSteps
    from dovetail.engine.pieces import PiecewiseGraphs
    from dovetail.engine.sampler import Sampler
    from dovetail.engine.verify_graphs import VerifyGraphs, VerifyKey
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.types import Attends, Batch, IntArray, Logprobs, Masks

G = TypeVar("G")


class Launched(NamedTuple, Generic[G]):
    """Describe a step whose forward pass was launched, for ``Runner.sample``.

    ``graph`` is what ``Runner.can_run`` returned. ``logits`` ``[logit rows, V]`` are valid until the next launch.
    """

    runner: Runner[G]
    graph: G
    logits: torch.Tensor
    prompt_logprobs: Sequence[tuple[int, IntArray, Logprobs]] = ()
    pooled: Sequence[tuple[int, torch.Tensor]] = ()


class Runner(ABC, Generic[G]):
    """Run batches of certain kinds. Not thread-safe."""

    @abstractmethod
    def can_run(self, batch: Batch) -> G | None:
        """Return what ``launch`` needs in order to run ``batch``, or None if this runner cannot run it now. May capture
        a graph."""

    @abstractmethod
    def launch(self, batch: Batch, graph: G) -> Launched[G]:
        """Compute the logits of ``batch``. ``graph`` is what ``can_run`` returned for it.

        Sends the batch's page updates to the device. Afterwards these fields of the batch are set, with the shapes that
        ``Batch`` defines, for every kind of step and with every runner: ``input_ids``, ``positions``, ``out_loc``,
        ``qo_indptr``, ``kv_lens``, ``page_table``, ``tree_mask`` (None unless the drafts are trees), ``attn``, ``kv``,
        ``watch``, and ``hidden`` (None unless layers are watched). ``page_table`` and ``tree_mask`` can have more
        columns than the step needs. If a graph ran, the tensors are views of its memory, which are valid until the next
        launch. ``logit_rows``, ``last`` and the tensors of ``shared`` are for the forward pass only and must not be
        used afterwards.
        """

    @abstractmethod
    def sample(self, batch: Batch, launched: Launched[G], masks: Masks | None) -> ForwardOutput:
        """Choose the tokens of the step among those that ``masks`` allows, and keep the last one of each row on the device for the next step. The output
        is valid until the next sample."""


class EagerSampler:
    """Sample steps kernel by kernel with a ``Sampler``, and keep their last tokens on the device for the next step."""

    def __init__(self, sampler: Sampler, inputs: Inputs) -> None:
        self.settings_of = sampler.settings_of
        self._sampler, self._inputs = sampler, inputs

    def sample(self, batch: Batch, logits: torch.Tensor, masks: Masks | None) -> ForwardOutput:
        """Choose tokens from ``logits``, which may be overwritten."""
        output = self._sampler.sample(batch, logits, masks)
        self._inputs.keep_last(batch, output.token_ids)
        return output


class DecodeGraphRunner(Runner["DecodeGraph"]):
    """Replay captured decode steps. The sampler is replayed too, unless rows need grammars, or very many biases or
    log-probabilities (see ``RowSettings.capturable``)."""

    def __init__(self, graphs: DecodeGraphs, sampler: EagerSampler, *, batch_invariant: bool = False) -> None:
        """With ``batch_invariant``, replay the sampler only if rows need filters and random numbers: the captured kernels
        compute log-probabilities to other bits than steps that are sampled kernel by kernel."""
        self._graphs, self._sampler, self._batch_invariant = graphs, sampler, batch_invariant
        self._captures = CaptureOnDemand(graphs)

    def can_run(self, batch: Batch) -> DecodeGraph | None:
        """See ``Runner``. This runner can run decode batches whose graph is captured, and may capture the graph now."""
        if batch.num_extend or batch.drafts is not None or not batch.samples.all():
            return None
        key = self._graphs.key_for(batch)
        chosen = None if key is None else self._captures.choose(key)
        return None if chosen is None else self._graphs.get(chosen)

    def launch(self, batch: Batch, graph: DecodeGraph) -> Launched[DecodeGraph]:
        """See ``Runner``."""
        numbers = decode_numbers(batch, self._sampler.settings_of(batch))
        return Launched(self, graph, self._graphs.launch(graph, batch, numbers))

    def sample(self, batch: Batch, launched: Launched[DecodeGraph], masks: Masks | None) -> ForwardOutput:
        """See ``Runner``."""
        settings = self._sampler.settings_of(batch)
        captured = settings.simple if self._batch_invariant else settings.capturable
        output = self._graphs.sample(launched.graph, len(batch.slots), settings) if captured else None
        return self._sampler.sample(batch, launched.logits, masks) if output is None else output


class VerifyGraphRunner(Runner["VerifyKey"]):
    """Replay captured steps of rows with drafts. Sampling and verification are replayed too, unless rows need more than
    filters and a random number."""

    def __init__(self, graphs: VerifyGraphs, sampler: EagerSampler) -> None:
        self._graphs, self._sampler = graphs, sampler
        self._captures = CaptureOnDemand(graphs)

    def can_run(self, batch: Batch) -> VerifyKey | None:
        """See ``Runner``. This runner can run batches of verify rows only whose graph is captured, and may capture the
        graph now."""
        if batch.num_extend or batch.drafts is None or batch.adapters is not None:
            return None
        key = self._graphs.key_for(batch)
        return None if key is None else self._captures.choose(key)

    def launch(self, batch: Batch, graph: VerifyKey) -> Launched[VerifyKey]:
        """See ``Runner``."""
        numbers = verify_numbers(batch, self._sampler.settings_of(batch))
        return Launched(self, graph, self._graphs.launch(graph, batch, numbers))

    def sample(self, batch: Batch, launched: Launched[VerifyKey], masks: Masks | None) -> ForwardOutput:
        """See ``Runner``."""
        settings = self._sampler.settings_of(batch)
        output = self._graphs.sample(launched.graph, batch, settings) if settings.simple else None
        if output is None:
            output = self._sampler.sample(batch, launched.logits, masks)
        self._graphs.advance(launched.graph, output)
        return output


class EagerRunner(Runner[AttentionBackend]):
    """Launch any step kernel by kernel, or in captured pieces with attention between them."""

    def __init__(
        self,
        model: ModelArchitecture,
        inputs: Inputs,
        pool: Pools,
        prefill: AttentionBackend,
        decode: AttentionBackend,
        sampler: EagerSampler,
        *,
        pieces: PiecewiseGraphs | None = None,
        watched: tuple[int, ...] = (),
        batch_invariant: bool = False,
        load: ExpertLoad | None = None,
        expansion: Expansion | None = None,
        adapters: EngineAdapters | None = None,
        own_rows: OwnRowsOfSteps | None = None,
    ) -> None:
        """``prefill`` attends in batches with prompt tokens, ``decode`` in others. ``watched`` is ``Batch.watch``. ``load``
        counts the tokens of experts. ``adapters`` are those that a batch may have. ``expansion`` chooses the steps whose prompts expand latents; ``prefill`` then offers
        ``attention.expanded``. ``own_rows`` finds the rows of this rank, with data-parallel attention."""
        self.prefill, self.decode = prefill, decode
        self._model, self._inputs, self._pools, self._sampler = model, inputs, pools_of(pool), sampler
        self._pieces, self._captures = pieces, None if pieces is None else CaptureOnDemand(pieces, PIECES_NEEDED)
        self._watched, self._batch_invariant, self._load = watched, batch_invariant, load
        self._expansion, self._own_rows = expansion, own_rows
        self._logits = RowLogits(model, adapters)
        # a drafter that watches the output of the last layer needs it for all tokens
        all_rows = max(watched, default=0) >= model.info.num_layers
        self._narrows = Feature.MODEL_LAST_ROWS in model.info.offers and not all_rows and own_rows is None

    def backend_for(self, batch: Batch) -> AttentionBackend:
        """Return the backend that attends in this batch."""
        return self.prefill if batch.num_extend else self.decode

    def can_run(self, batch: Batch) -> AttentionBackend:
        """See ``Runner``. This runner can run every batch, and returns the backend that attends in it."""
        return self.backend_for(batch)

    def launch(self, batch: Batch, graph: AttentionBackend) -> Launched[AttentionBackend]:
        """See ``Runner``."""
        self._inputs.prepare(batch)
        if self._own_rows is None:
            self._plan(batch)
        else:
            batch.own = self._own_rows.of_step(batch, self._plan)
            batch.attn, batch.kv = backends_of(graph), self._pools
        batch.watch = self._watched
        hidden = self._forward(batch)
        found, vectors = prompt_logprobs(self._logits, batch, hidden), pooled(self._logits, batch, hidden)
        sampled_only = batch.logit_rows is None or batch.last is not None
        logits = self._logits.of(batch, hidden if sampled_only else hidden[batch.logit_rows])
        return Launched(self, graph, logits, found, vectors)

    def _plan(self, batch: Batch) -> None:
        """Plan the attention of a prepared batch, and set ``batch.attn`` and ``batch.kv``."""
        graph = self.backend_for(batch)
        attends: tuple[Attends, ...] = backends_of(graph)
        states = self._inputs.states
        if self._batch_invariant and batch.tree_mask is not None:
            attends = tuple(NodeRows(own, batch.view(group)) for group, own in enumerate(backends_of(graph)))
        elif self._expands(batch):
            assert self._expansion is not None
            self._expansion.plan(batch, self.prefill, self.decode, self._inputs.page_size)
        else:
            graph.plan(batch)
        batch.attn, batch.kv = attends, self._pools
        if states is not None:
            batch.attn = (*attends, *states.of_step(batch))

    def _expands(self, batch: Batch) -> bool:
        """Return True if the prompts of this batch expand latents."""
        if self._expansion is None or not batch.num_extend or batch.adapters is not None:
            return False
        in_pieces = self._pieces is not None and self._pieces.size_for(len(batch.input_ids)) is not None
        return self._expansion.pays(batch, in_pieces=in_pieces)

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Return the hidden states of a planned batch: of all its tokens, or, if this method sets ``batch.last``, of
        the rows of ``batch.last``. Uses captured pieces if the size has been needed often enough, except for drafts of models
        with states, whose layers must keep what they compute."""
        pieces, captures = self._pieces, self._captures
        keeps = batch.drafts is not None and self._inputs.states is not None
        alone = batch.expanded is not None or batch.adapters is not None or keeps
        if pieces is not None and captures is not None and not alone:
            size = pieces.size_for(len(batch.input_ids))
            size = None if size is None else captures.choose(size)
            if size is not None:
                return pieces.forward(size, batch)
        apart = batch.expanded is not None and batch.expanded.rest is not None  # then ``decode`` is planned already
        if self._narrows and not apart and batch.adapters is None and narrows(batch):
            batch.last = last_rows(batch, self.decode)
        hidden = self._model.forward(batch)
        if self._load is not None:
            self._load.add(batch)
        return hidden

    def sample(self, batch: Batch, launched: Launched[AttentionBackend], masks: Masks | None) -> ForwardOutput:
        """See ``Runner``."""
        output = self._sampler.sample(batch, launched.logits, masks)
        output.prompt_logprobs, output.pooled = launched.prompt_logprobs, launched.pooled
        if self._inputs.states is not None and batch.drafts is not None and output.accept_lens is not None:
            accepted = output.accept_lens[batch.num_extend - len(batch.slots) :]
            if batch.own is None:
                advance_states(batch, accepted)
            elif batch.own.batch is not None:
                mine = kept(batch.slots, batch.own.tp) - batch.num_extend
                advance_states(batch.own.batch, accepted[to_device(mine[mine >= 0], accepted.device)])
        return output

"""Run batches on one device: a model, its KV pool and its attention backends. ``forward(batch)`` is one step."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dovetail.config import config_hash
from dovetail.engine.build import as_module
from dovetail.engine.captures import CaptureAgreement, capture_all
from dovetail.engine.draft_pages import DraftPages
from dovetail.engine.draft_runtime import EngineDraftRuntime
from dovetail.engine.expansion import Expansion
from dovetail.engine.expert_load import ExpertLoad
from dovetail.engine.graphs import DecodeGraphs
from dovetail.engine.grouped import Pools, grouped_attention, grouped_pools, pools_of
from dovetail.engine.inputs import Inputs
from dovetail.engine.kernel_set import kernel_set
from dovetail.engine.kv_scales import load_kv_scales
from dovetail.engine.memory import agreed_budget, budget_for, describe_groups, group_bytes, share_memory, with_arena
from dovetail.engine.mesh import local_info, rank_device
from dovetail.engine.needs import GraphNeeds, affordable_pieces, captures_trees, measure_needs, verify_sizes
from dovetail.engine.outputs import fetched, step_result
from dovetail.engine.own_rows import OwnRowsOfSteps
from dovetail.engine.penalties import TokenCounts
from dovetail.engine.pieces import PiecewiseGraphs, launch_bound, step_seconds
from dovetail.engine.processors import RowProcessors
from dovetail.engine.runners import DecodeGraphRunner, EagerRunner, EagerSampler, Launched, Runner, VerifyGraphRunner
from dovetail.engine.sampler import Sampler
from dovetail.engine.sharing import PrefixSharing
from dovetail.engine.states import StateSlots, build_mixer
from dovetail.engine.verify import compact
from dovetail.engine.verify_graphs import VerifyGraphs
from dovetail.engine.warmup import WarmUp
from dovetail.engine.weights import build_model, load_weights, names_reader
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.executor import WarmUpProgress
from dovetail.interfaces.experts import ExpertsContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.logits import ProcessorContext
from dovetail.interfaces.mesh import SINGLE, Mesh
from dovetail.interfaces.quantization import QuantizationContext
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.interfaces.store import KVStoreFactory, StoreContext
from dovetail.layers.experts import layers_of_experts
from dovetail.layers.linear import Linear, make_batch_invariant
from dovetail.memory.pool import make_arena, make_states, pool_dtype

if TYPE_CHECKING:
    from dovetail.config.sections import Config
    from dovetail.engine.captures import Captures
    from dovetail.interfaces.model import ModelArchitecture
    from dovetail.registry.resolver import Chosen, Resolved
    from dovetail.types import Batch, ForwardOutput, IntArray, Masks, PageUpdates, StepResult

log = logging.getLogger(__name__)


class Engine:
    """Build model, pool and attention backends from a resolved config, and run batches on them. Not thread-safe.

    ``page_table`` (int32 ``[groups, slots, max_pages]``) is the host's page table, which the engine only reads. Each
    batch runs in the first of ``runners`` that can run it; the last one can run every batch.
    """

    def __init__(self, resolved: Resolved, eos_token_ids: frozenset[int], mesh: Mesh = SINGLE) -> None:
        """Build the engine of one rank of ``mesh``. All ranks must be built, and called, alike."""
        config, info = resolved.config, resolved.model_info
        if config.parallel.tp != mesh.tp.size:
            raise ConfigError(
                f"parallel.tp is {config.parallel.tp}, and this engine was built for a mesh of {mesh.tp.size} ranks"
            )
        _set_threads(config, mesh)
        self.info, self.device = info, rank_device(resolved.machine.device, mesh.tp.rank)
        self.directory = resolved.model_dir
        self.mesh, self._local = mesh, local_info(info, mesh)
        self._agreement = CaptureAgreement(mesh) if mesh.tp.size > 1 else None
        self.context_len = min(info.context_len, config.model.context_len or info.context_len)
        self.page_size = config.memory.page_size
        self._config, self._dtype = config, getattr(torch, config.model.dtype)
        self._batch_invariant = config.batch_invariant
        rehearses = [
            Feature.ATTN_REHEARSAL in chosen.spec.offers
            for chosen in (resolved.attention_prefill, resolved.attention_decode)
        ]
        self.warm_up = WarmUp(
            self.device,
            info,
            mesh,
            attend_prefill=rehearses[0],
            attend_decode=rehearses[1],
            kernel_set=kernel_set(resolved),
            settings=config_hash(config),
        )
        try:
            self._build(resolved, eos_token_ids)
        except BaseException:
            self.close()
            raise
        self.warm_up.release()

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self, resolved: Resolved, eos_token_ids: frozenset[int]) -> None:
        """Load the model, allocate the KV pool, and build the runners of steps."""
        config, info, mesh = resolved.config, self.info, self.mesh
        context = StoreContext(self.page_size, self._kv_dtype, self.device, info.quantization, self._dtype)
        self.stores: KVStoreFactory = resolved.store.build(context)
        quantization = None
        if (chosen := resolved.quantization) is not None:
            names = names_reader(resolved.model_dir, config.model.load_format)
            stored_as = QuantizationContext(info.quantization, self._dtype, self.device, config.batch_invariant, names)
            quantization = chosen.build(stored_as)
        experts = None
        if (backend := resolved.experts) is not None:
            experts = backend.build(ExpertsContext(self.device, self._dtype, config.batch_invariant))
        self.model = build_model(resolved.model.load(), info, self.device, self._dtype, mesh, quantization, experts)
        if backend is not None and Feature.EXPERTS_REHEARSAL not in backend.spec.offers:
            self.warm_up.leave_out_experts(as_module(self.model))
        if config.batch_invariant:
            make_batch_invariant(as_module(self.model))
            _check_experts(self.model)
        counts = config.metrics.expert_load is not None
        self.expert_load = ExpertLoad(self.model, self.page_size, self.device) if counts else None
        self._mixer = build_mixer(resolved, self.device, self._dtype)
        self._note_prompts(resolved)
        self.adapters = None
        if config.adapters.enabled:
            from dovetail.engine.adapters import build_adapters

            self.adapters = build_adapters(self.model, resolved, self.device, self._dtype, mesh)
        load_weights(
            self.model, resolved.model_dir, config.model.load_format, config.model.seed, shown=mesh.tp.rank == 0
        )
        stored = None if info.quantization is None else quantization
        self._draft_runtime = EngineDraftRuntime(resolved, self.model, self.device, self._dtype, mesh, stored)
        self.drafter = self._build_drafter(resolved)
        self.watched = self._draft_runtime.watched
        self._step_seconds = step_seconds(self.model, mesh)
        requested = config.graphs.piecewise_tokens
        self._piece_tokens = mesh.tp.min(self._useful_pieces()) if requested is None else requested
        if mesh.attention == "data" or (backend is not None and Feature.EXPERTS_GRAPH not in backend.spec.offers):
            self._piece_tokens = 0
        # before the pool, which gets what memory is left
        self.counts = TokenCounts(config.scheduler.rows + 1, info.vocab_size, self.device)
        self._allocate_pool(resolved)
        context = ProcessorContext(self.device, info.vocab_size, eos_token_ids)
        processors = RowProcessors.build(resolved.logits_processors, context)
        self.sampler = Sampler(info.vocab_size, eos_token_ids, self.device, self.counts, processors)
        self._build_runners(resolved)
        if self.drafter is not None and resolved.drafter is not None:
            self.expect_drafts(self.drafter.max_draft_tokens, trees=captures_trees(resolved))
            for graphs in self._draft_runtime.graphs:
                self.warm_up.note_drafts(graphs)

    def close(self) -> None:
        """End the processes that compile kernels. The device's memory stays allocated while the engine is referenced."""
        self.warm_up.close()

    def _useful_pieces(self) -> int:
        """Return the number of tokens up to which this rank should capture steps with prompts."""
        tokens = launch_bound(self._step_seconds)
        if self.device.type == "cpu":
            return tokens
        memory = torch.cuda.mem_get_info(self.device)[0] * self._config.memory.fraction
        graphs = GraphNeeds(0, len(self.watched), tokens, self._dtype.itemsize)
        return affordable_pieces(self._local, graphs, memory)

    def _build_drafter(self, resolved: Resolved) -> Drafter | None:
        """Build the drafter. This must happen before the pool is allocated, because the drafter's models and caches
        take memory too."""
        if resolved.drafter is None:
            return None
        rows, runtime = resolved.config.scheduler.rows, self._draft_runtime
        return resolved.drafter.build(
            DrafterContext(self.device, self.info.vocab_size, rows, self.context_len, runtime)
        )

    def _allocate_pool(self, resolved: Resolved) -> None:
        """Measure the memory that the pool must leave free. Then allocate the pool, the request table and the inputs,
        and limit the context length to the tokens that the pool holds."""
        config, runtime, groups = resolved.config, self._draft_runtime, self._local.cache_groups
        one_page = self._make_pools(2)
        draft_tokens = self.drafter.max_draft_tokens if self.drafter else 0
        graphs = GraphNeeds(draft_tokens, len(self.watched), self._piece_tokens, self._dtype.itemsize)
        attention = functools.partial(self._attention, resolved.attention_prefill, one_page)
        with self.warm_up.measuring():
            needs = measure_needs(
                resolved, self.model, self._local, one_page, self.context_len, attention, graphs, self.adapters
            )
        needs = replace(needs, weights=needs.weights + runtime.weight_bytes)
        draft_bytes = runtime.page_bytes(self.page_size, self.stores)
        sizes = [group_bytes(group, self.stores, self.page_size) for group in groups]
        divide = functools.partial(budget_for, config, sizes, self.device, self.context_len, needs, draft_bytes)
        budget = agreed_budget(divide, self.mesh)
        shared = share_memory(groups, resolved.store.spec.offers, draft_bytes)
        self.budget = with_arena(budget, config, sizes, draft_bytes) if shared else budget
        log.info("%s", self.budget)
        self.num_pages = self.budget.num_pages
        arena = self.budget.arena
        self.pool = (
            self._make_pools(self.num_pages)
            if arena is None
            else grouped_pools(*make_arena(groups, arena, self.stores, self._kv_dtype, self.device), self._mixer)
        )
        if self.stores.reads_scales:
            load_kv_scales(pools_of(self.pool), self.model, resolved, self.mesh.of_attention)
        self.keeps_all = draft_bytes > 0
        pools = pools_of(self.pool)
        if pools:
            self.context_len = min(self.context_len, (self.num_pages - 1) * self.page_size)
        max_pages = -(-self.context_len // self.page_size) + 1
        self.page_table = np.zeros((len(pools), config.scheduler.rows + 1, max_pages), np.int32)
        states = StateSlots.of(self.pool, config.scheduler.rows + 1, self.mesh)
        self.inputs = Inputs(self.page_table, self.page_size, self.device, states)
        if pools:
            pages = DraftPages(self.num_pages) if arena is None else DraftPages.in_arena(arena)
            runtime.allocate(self.inputs, pages, self.stores, self.context_len)

    @property
    def _kv_dtype(self) -> torch.dtype:
        named = self._config.memory.kv_dtype
        return self._dtype if named == "auto" else pool_dtype(named)

    def _make_pools(self, num_pages: int) -> Pools:
        """Return a pool of ``num_pages`` for each cache group. Two pages, of which one is page 0, suffice for steps that
        answer no request."""
        paged = [group for group in self._local.cache_groups if group.kind is not CacheGroupKind.STATE]
        states = [group for group in self._local.cache_groups if group.kind is CacheGroupKind.STATE]
        own = [self.stores.make(group, num_pages) for group in paged]
        slots = [make_states(group, num_pages, self.stores, self.device) for group in states]
        return grouped_pools(own, slots, self._mixer)

    def _note_prompts(self, resolved: Resolved) -> None:
        """Note the kernels of steps with prompts. This needs no weights: processes compile while they are loaded."""
        pool, rows = self._make_pools(2), resolved.config.scheduler.rows
        attention = functools.partial(self._attention, resolved.attention_prefill, pool)
        self.warm_up.note_prompts(self.model, attention, pool, rows, self._dtype)

    def _attention(self, chosen: Chosen, pool: Pools) -> AttentionBackend:
        """Build the backend of each cache group."""
        contexts = (
            AttentionContext(
                device=self.device,
                dtype=self._dtype,
                num_heads=self._local.num_heads,
                num_kv_heads=own.group.num_kv_heads,
                head_dim=own.group.head_dim,
                pool=own,
                max_rows=self._config.scheduler.rows,
                max_context=self.context_len,
                batch_invariant=self._batch_invariant,
                value_dim=own.group.value_dim,
            )
            for own in pools_of(pool)
        )
        return grouped_attention([chosen.build(context) for context in contexts])

    def _build_runners(self, resolved: Resolved) -> None:
        config = resolved.config
        prefill = self._attention(resolved.attention_prefill, self.pool)
        decode = self._attention(resolved.attention_decode, self.pool)
        self.sharing = PrefixSharing.of(resolved, self._local.cache_groups)
        self.graphs = self._build_graphs(config, decode) if config.graphs.decode is True else None
        self.verify_graphs: VerifyGraphs | None = None
        self._captures_verify = (
            self.graphs is not None and Feature.ATTN_VERIFY_GRAPH in resolved.attention_decode.spec.offers
        )
        self.pieces = self._build_pieces(config)
        self._eager_sampler = EagerSampler(self.sampler, self.inputs)
        self.eager_runner = EagerRunner(
            self.model,
            self.inputs,
            self.pool,
            prefill,
            decode,
            self._eager_sampler,
            pieces=self.pieces,
            watched=self.watched,
            batch_invariant=self._batch_invariant,
            load=self.expert_load,
            expansion=Expansion.of(resolved, self.model),
            adapters=self.adapters,
            own_rows=OwnRowsOfSteps.of(self.mesh, self.inputs),
        )
        self._order_runners()

    def _order_runners(self) -> None:
        """Order the runners. The runner of verify steps comes first, because a step with drafts starts only after the
        one before it has ended: the device is idle while the host looks for a runner."""
        runners: list[Runner[Any]] = []
        if self.verify_graphs is not None:
            runners.append(VerifyGraphRunner(self.verify_graphs, self._eager_sampler))
        if self.graphs is not None:
            runners.append(DecodeGraphRunner(self.graphs, self._eager_sampler, batch_invariant=self._batch_invariant))
        self.runners: tuple[Runner[Any], ...] = (*runners, self.eager_runner)

    def _build_graphs(self, config: Config, decode: AttentionBackend) -> DecodeGraphs:
        rows = min(config.scheduler.rows, config.graphs.max_rows)
        graphs = DecodeGraphs(
            self.model,
            self.inputs,
            self.pool,
            decode,
            rows,
            self.context_len,
            self.sharing,
            self.watched,
            counts=self.counts,
            mesh=self.mesh,
            load=self.expert_load,
            adapters=self.adapters,
        )
        self.warm_up.note_decode(graphs)
        if config.graphs.capture == "start":
            capture_all(graphs, "decode steps", self.mesh)
        else:
            self.warm_up.start(graphs, self._step_seconds, config.scheduler.chunk)
        return graphs

    def _build_pieces(self, config: Config) -> PiecewiseGraphs | None:
        if self.device.type != "cuda" or not self._piece_tokens:
            return None
        pieces = PiecewiseGraphs(
            self.model,
            self._local.num_heads,
            self.pool,
            self._piece_tokens,
            self._dtype,
            self.watched,
            self.expert_load,
        )
        if config.graphs.capture == "start":
            capture_all(pieces, "steps with prompts", self.mesh)
        return pieces

    def expect_drafts(self, most: int, *, trees: bool) -> None:
        """Expect rows with up to ``most`` drafts from now on, in chains or, with ``trees``, in trees. Their steps are
        captured if decode steps are captured and the attention backend offers attention.verify_graph."""
        if not self._captures_verify:
            return
        config, decode = self._config, self.eager_runner.decode
        sizes = verify_sizes(config, most, self.context_len, trees=trees)
        graphs = VerifyGraphs(
            self.model, self.inputs, self.pool, decode, sizes, self.watched, self.mesh, self.expert_load
        )
        self.warm_up.note_verify(graphs)
        if config.graphs.capture == "start":
            capture_all(graphs, "verify steps", self.mesh)
        self.use_verify_graphs(graphs)

    def use_verify_graphs(self, graphs: VerifyGraphs) -> None:
        """Run verify steps in ``graphs`` from now on."""
        self.verify_graphs = graphs
        self._order_runners()

    @property
    def shares_prefixes(self) -> bool:
        """Return True if rows of a step may read the prefixes that they share once."""
        return bool(self.sharing.order)

    @property
    def cache_groups(self) -> list[dict[str, Any]]:
        """Return what ``describe_groups`` does."""
        return describe_groups(self.budget, self._local.cache_groups, self.stores, self.page_size)

    @property
    def products(self) -> dict[str, str]:
        """Return, for each shape of a weight, a text that names what computes matrix products with it."""
        layers = [layer for layer in as_module(self.model).modules() if isinstance(layer, Linear)]
        texts = {(layer.out_features, layer.in_features): layer.product.describe for layer in layers}
        found = {f"{rows} x {columns}": text for (rows, columns), text in texts.items()}
        for layer in layers_of_experts(as_module(self.model)):
            count, size, hidden = len(layer.held), len(layer.share), layer.shape.hidden_size
            found[f"{count} experts of {size} x {hidden}"] = layer.product.describe
        return found

    # -- steps -------------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, masks: Masks | None = None) -> ForwardOutput:
        """Launch the forward pass and sample from it."""
        return self.sample(batch, self.launch(batch), masks)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Launched[Any]:
        """Launch the forward pass of a step, and set the batch's engine fields (see ``Runner.launch``). Under overlap
        the host reads the tokens of the previous step while the device computes this one."""
        if batch.adapters is None or self.adapters is None:
            return self._launch(batch)
        with self.adapters.active(batch):
            return self._launch(batch)

    def _launch(self, batch: Batch) -> Launched[Any]:
        if batch.drafts is None or batch.shared is not None:
            self._choose_attention(batch)
        for runner in self.runners:
            graph = runner.can_run(batch)
            if graph is not None:
                self.check_captures()
                launched = runner.launch(batch, graph)
                if runner is self.eager_runner:  # it may have captured pieces
                    self.check_captures()
                self.warm_up.between_steps(self.graphs, batch)
                return launched
        raise AssertionError("the last runner can run every batch")

    def _choose_attention(self, batch: Batch) -> None:
        """Decide in which cache groups attention reads shared prefixes once, and which variant of the backend it uses for a
        decode batch."""
        backend = self.eager_runner.backend_for(batch)
        if batch.shared is not None:
            batch.shared = self.sharing.choose(batch, backend)
        if not batch.num_extend and batch.drafts is None:
            batch.variant = backend.variant(batch)

    @torch.inference_mode()
    def sample(self, batch: Batch, launched: Launched[Any], masks: Masks | None = None) -> ForwardOutput:
        """Choose the tokens of a step among those that ``masks`` allows, keep the last token of each row on the device
        for the next step, and move the KV of accepted tree drafts to the locations of their positions. ``launched``
        must be the step that was launched last."""
        output = launched.runner.sample(batch, launched, masks)
        if batch.tree_mask is not None:
            compact(batch, output, self.pool, self.mesh)
        on_cuda = self.device.type == "cuda"
        if on_cuda and output.on_host is None:
            output.on_host = fetched(output)
        if output.result is None:
            output.result = step_result(output.on_host or output)  # while the device computes: ``wait`` is short
        if on_cuda:
            output.event = torch.cuda.Event()
            output.event.record()
        return output

    def mask_buffer(self, rows: int, width: int) -> IntArray:
        """Return uninitialised memory for the bitmasks of one step, int32 ``[rows, width]``."""
        return self.sampler.mask_buffers.take(rows, width)

    def locate_updates(self, updates: PageUpdates) -> None:
        """Prepare page updates of the next step while the device computes this one. If the next step has other updates,
        this has no effect."""
        self.inputs.locate_updates(updates)

    def wait(self, batch: Batch, output: ForwardOutput) -> StepResult:
        """Return a step's output on the host, and wait for it. The host waits for the output of a step only here."""
        if output.event is not None:
            output.event.synchronize()
            if self.verify_graphs is not None:
                self.verify_graphs.computed(batch)
        return output.result or step_result(output.on_host or output)

    def check_captures(self) -> None:
        """Check that all ranks have captured the same graphs, if one was captured since the last call. Raises
        ``RankLostError``."""
        if self._agreement is not None:
            self._agreement.check(self.captures)

    def idle(self) -> bool:
        """Try to capture one graph while there is no other work. Return False if no graph is missing."""
        return self.warm_up.capture_next(self.captures)

    @property
    def captures(self) -> list[Captures[Any]]:
        """Return everything that captures graphs, in the order in which it is captured while there is no other work."""
        kinds = self.graphs, self.verify_graphs, *self._draft_runtime.graphs, self.pieces
        return [graphs for graphs in kinds if graphs is not None]

    @property
    def progress(self) -> WarmUpProgress:
        """Return how far the preparation of the engine is."""
        return self.warm_up.progress(self.captures)


def _check_experts(model: ModelArchitecture) -> None:
    """Raise ``ConfigError`` if a layer of experts of a model that is to be batch-invariant has no backend."""
    if any(layer.backend is None for layer in layers_of_experts(as_module(model))):
        raise ConfigError(
            f"batch_invariant is true, and {model.info.architecture} has experts that its description does not declare "
            "(ModelInfo.expert_sizes), so that no backend was chosen for them. Set batch_invariant: false"
        )


def _set_threads(config: Config, mesh: Mesh) -> None:
    """Use the number of threads that config gives. Otherwise the ranks divide torch's own number among them."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    elif mesh.tp.size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // mesh.tp.size))

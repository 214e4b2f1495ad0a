"""Give drafters that run a model access to the engine's models and memory (see ``interfaces.speculative``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from dovetail.config.checkpoint import read_json
from dovetail.engine.build import ModelClass, as_module, build_model
from dovetail.engine.captures import NO_UPDATES, capture_all
from dovetail.engine.draft_layout import seen_by, wide_shape
from dovetail.engine.draft_pages import DraftPages
from dovetail.engine.grouped import Pools, backends_of, grouped_attention, grouped_pools, pools_of
from dovetail.engine.inputs import Inputs, largest, ragged
from dovetail.engine.memory import module_bytes
from dovetail.engine.mesh import local_info
from dovetail.engine.own_rows import kept, tokens_of
from dovetail.engine.weights import load_weights, names_reader
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.cache import CacheGroupKind
from dovetail.interfaces.experts import ExpertsBackend, ExpertsContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.quantization import QuantizationContext
from dovetail.interfaces.speculative import DraftCache, DraftPass, DraftRuntime, DraftSteps
from dovetail.layers.own_rows import OwnRows
from dovetail.registry.draft_models import draft_model
from dovetail.registry.quantizations import choose, expert_feature
from dovetail.registry.ranks import check_ranks
from dovetail.registry.stages import kernel_dims, latent_reasons
from dovetail.registry.targets import load_attribute
from dovetail.types import Batch

if TYPE_CHECKING:
    from dovetail.engine.draft_graphs import DraftGraphs
    from dovetail.engine.inputs import Array
    from dovetail.interfaces.mesh import Mesh
    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.interfaces.quantization import Quantization
    from dovetail.interfaces.store import KVStoreFactory
    from dovetail.registry.resolver import Resolved
    from dovetail.types import BoolArray, IntArray


class EngineDraftCache(DraftCache):
    """Hold KV pools with the pages of the target's first cache group that has some, and attention backends of the kinds
    that were chosen for the target. ``info`` describes the share of the drafter's model that this rank of ``mesh`` has."""

    def __init__(self, info: ModelInfo, mesh: Mesh) -> None:
        self.info = info
        self._mesh = mesh
        self.graphs: DraftGraphs | None = None
        self._steps: list[DraftSteps] = []
        self._inputs: Inputs | None = None
        self._pages = DraftPages(0)
        self._pool: Pools | None = None
        self._backends: tuple[AttentionBackend, AttentionBackend] | None = None

    def allocate(
        self,
        resolved: Resolved,
        inputs: Inputs,
        pages: DraftPages,
        stores: KVStoreFactory,
        dtype: torch.dtype,
        max_context: int,
    ) -> None:
        """Allocate the memory. The engine calls this once the number of pages of the target is known. The memory is
        filled with zeros: if the drafter has not seen some tokens, it reads zeros as their KV, which only lowers the
        acceptance rate."""
        self._inputs, self._pages = inputs, pages
        pools = [stores.make(group, pages.num_pages) for group in self.info.cache_groups]
        for own in pools:
            own.clear()
        self._pool = grouped_pools(pools)
        rows = resolved.config.scheduler.rows
        contexts = [
            AttentionContext(
                device=inputs.device,
                dtype=dtype,
                num_heads=self.info.num_heads,
                num_kv_heads=own.group.num_kv_heads,
                head_dim=own.group.head_dim,
                pool=own,
                max_rows=rows,
                max_context=max_context,
                value_dim=own.group.value_dim,
            )
            for own in pools
        ]
        prefill, decode = (
            grouped_attention([chosen.build(context) for context in contexts])
            for chosen in (resolved.attention_prefill, resolved.attention_decode)
        )
        self._backends = prefill, decode
        section = resolved.config.graphs
        if section.decode is True and self._steps:
            from dovetail.engine.draft_graphs import DraftGraphs, DraftLimits

            wide = Feature.ATTN_VERIFY_GRAPH in resolved.attention_decode.spec.offers
            limits = DraftLimits(min(rows, section.max_rows), section.max_rows, max_context, wide)
            self.graphs = DraftGraphs(self._steps, inputs, self._pool, self._backends[1], limits, self._mesh, pages)
            if section.capture == "start":
                capture_all(self.graphs, "draft steps", self._mesh)

    def batch(
        self, slots: IntArray, starts: IntArray, counts: IntArray, *, tree: tuple[IntArray, BoolArray] | None = None
    ) -> Batch:
        """See ``DraftCache``."""
        positions, *masks = tree or (None,)
        batch, masks = self._located(slots, starts, counts, positions, *masks)
        return self._planned(batch, positions, *masks)

    def register(self, steps: DraftSteps) -> None:
        """See ``DraftCache``."""
        assert self._inputs is None, "register is called in the constructor of the drafter"
        self._steps.append(steps)

    def run(
        self, steps: DraftSteps, slots: IntArray, passes: Sequence[DraftPass], state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        """See ``DraftCache``."""
        replayed = None if self.graphs is None else self.graphs.run(steps, slots, passes, state)
        if replayed is not None:
            return replayed
        for one in passes:
            rows = int((one.counts > 0).sum())
            self._run_pass(steps, slots[:rows], one, tuple(tensor[:rows] for tensor in state))
        return state

    def _run_pass(self, steps: DraftSteps, slots: IntArray, given: DraftPass, state: tuple[torch.Tensor, ...]) -> None:
        """Launch a pass kernel by kernel. ``slots`` and ``state`` have only the rows that have tokens in this pass."""
        rows, stride = len(slots), max(steps.widths)
        starts, counts = given.starts[:rows], given.counts[:rows]
        firsts = np.cumsum(counts) - counts
        index = np.arange(int(counts.sum())) + np.repeat(np.arange(rows) * stride - firsts, counts)
        batch, (tokens,) = self._located(slots, starts, counts, given.positions, index)
        mask = steps.mask(state)
        seen = () if mask is None else (seen_by(mask, tokens, int(counts.max())),)
        steps.run(given.kind, self._planned(batch, given.positions, *seen), tokens, state)

    def _located(
        self, slots: IntArray, starts: IntArray, counts: IntArray, positions: Array | None, *others: Array
    ) -> tuple[Batch, list[torch.Tensor]]:
        """Return a batch that is not planned yet, and ``others`` on the device, which the same copy sends.
        ``positions`` are the positions of the tokens; None means that they equal the tokens' indices."""
        inputs = self._inputs
        assert inputs is not None, "the memory of a draft cache is allocated once the engine is built"
        rows = len(slots)
        batch = Batch([], rows, slots, starts, counts, np.ones(rows, np.bool_), NO_UPDATES)
        kv_lens = (starts + counts).astype(np.int32)
        table = self._pages.of(inputs.page_table[slots, : -(-largest(kv_lens) // inputs.page_size)])
        indptr, row_of, places, own_positions = ragged(batch)
        given = (own_positions if positions is None else positions).astype(np.int64)
        arrays = [given, inputs.locate(row_of, places, table), indptr, kv_lens, table, *others]
        batch.positions, batch.out_loc, batch.qo_indptr, batch.kv_lens, batch.page_table, *sent = inputs.upload(
            *arrays, updates=NO_UPDATES
        )
        return batch, sent

    def _planned(self, batch: Batch, positions: Array | None, mask: torch.Tensor | None = None) -> Batch:
        """Plan the attention of ``batch``, or with data-parallel attention of its own rows, and return it. For ``positions`` see
        ``_located``, for ``mask`` see ``_plan``."""
        tp = self._mesh.tp
        if self._mesh.attention == "heads":
            return self._plan(batch, mask)
        rows = kept(batch.slots, tp)
        tokens = tokens_of(batch, rows)
        own_positions = None if positions is None else positions[tokens]
        arrays = batch.slots[rows], batch.prefix_lens[rows], batch.extend_lens[rows], own_positions, tokens
        own, (index,) = self._located(*arrays) if len(rows) else (None, [batch.positions[:0]])
        batch.own = OwnRows(own, index, index, tp)
        if own is not None:
            self._plan(own, None if mask is None else mask.index_select(0, index))
        return batch

    def _plan(self, batch: Batch, mask: torch.Tensor | None) -> Batch:
        """Plan ``batch`` and return it. With ``mask``, its rows are trees. Without, they are extend rows if one of them
        has several tokens, and decode rows otherwise."""
        pool, backends = self._pool, self._backends
        assert pool is not None
        assert backends is not None
        extends = mask is None and largest(batch.extend_lens) > 1
        backend = backends[0 if extends else 1]
        batch.attn, batch.kv, batch.tree_mask = backends_of(backend), pools_of(pool), mask
        batch.views = (batch,) * (len(batch.kv) - 1)  # all groups of the drafter's model have the same pages
        if not extends:
            batch.num_extend = 0
            if mask is None:
                batch.variant = backend.variant(batch)
            else:
                batch.drafts = wide_shape(batch.extend_lens)
        backend.plan(batch)
        return batch


class EngineDraftRuntime(DraftRuntime):
    """Give drafters access to the target, its checkpoint and the device. ``watched`` are the layers whose hidden states
    the drafter reads, in the order that it requested. ``stored`` is the quantization in which the target's checkpoint is
    stored, if it is quantized: further layers in its files are stored alike."""

    def __init__(
        self,
        resolved: Resolved,
        target: ModelArchitecture,
        device: torch.device,
        dtype: torch.dtype,
        mesh: Mesh,
        stored: Quantization | None = None,
    ) -> None:
        self.target = target
        self.directory = resolved.model_dir
        self.checkpoint = {**read_json(self.directory, "config.json"), **resolved.config.model.overrides}
        self.dtype = dtype
        self.watched: tuple[int, ...] = ()
        self._resolved = resolved
        self._device = device
        self._mesh = mesh
        self._stored = stored
        self._caches: list[EngineDraftCache] = []
        self._models: list[ModelArchitecture] = []

    def watch(self, layers: Sequence[int]) -> None:
        """See ``DraftRuntime``."""
        most = self.target.info.num_layers
        if not layers or not all(0 <= layer <= most + 1 for layer in layers):
            raise ConfigError(
                f"the drafter needs hidden states of layers {list(layers)}; the target has 0 to {most} ({most}: its output; "
                f"{most + 1}: before the final norm)"
            )
        if Feature.MODEL_HIDDEN_STATES not in self.target.info.offers:
            raise ConfigError(
                f"the drafter needs hidden states, which {self.target.info.architecture} does not offer "
                f"({Feature.MODEL_HIDDEN_STATES}); choose a drafter that needs none, such as ngram"
            )
        assert not self.watched, "watch is called once"
        self.watched = tuple(layers)

    def create_cache(self, info: ModelInfo) -> EngineDraftCache:
        """See ``DraftRuntime``. Raises ``ConfigError`` for targets that keep only states: they have no pages."""
        if {group.kind for group in self.target.info.cache_groups} == {CacheGroupKind.STATE}:
            raise ConfigError(
                f"the drafter keeps keys and values of its own in pages like the target's; {self.target.info.architecture} keeps only "
                f"states and has no pages ({Feature.KV_DRAFT_CACHE}); choose a drafter that keeps none, such as ngram"
            )
        self._check_attention(info)
        cache = EngineDraftCache(local_info(info, self._mesh), self._mesh)
        self._caches.append(cache)
        return cache

    def _check_attention(self, info: ModelInfo) -> None:
        """Raise ``ConfigError`` if an attention backend of the target cannot serve a drafter's model."""
        for chosen in (self._resolved.attention_prefill, self._resolved.attention_decode):
            dims = chosen.spec.constraints.head_dims
            if dims and not kernel_dims(info) <= set(dims):
                raise ConfigError(
                    f"the drafter's model has head_dim {info.head_dim}; attention {chosen.spec.name!r} has kernels for "
                    f"{', '.join(map(str, dims))}: select another attention backend"
                )
            for reason in latent_reasons(chosen.spec.constraints, info):
                raise ConfigError(
                    f"the drafter's model cannot use attention {chosen.spec.name!r}, which {reason.expected} ({reason.got}): select "
                    "another attention backend"
                )
            needs = {feature for feature in info.needs if feature.partition(".")[0] == str(chosen.spec.kind)}
            if any(group.kind is CacheGroupKind.LATENT for group in info.cache_groups):
                needs.add(Feature.ATTN_LATENT)
            missing = needs - chosen.spec.offers
            if missing:
                raise ConfigError(
                    f"the drafter's model needs {', '.join(sorted(missing))}, which attention {chosen.spec.name!r} does not offer: "
                    "select another attention backend"
                )

    def load(self, model: ModelClass, info: ModelInfo, directory: Path, load_format: str) -> ModelArchitecture:
        """See ``DraftRuntime``. Raises ``ConfigError`` too if the engine has no memory for a cache group of the model."""
        if directory != self.directory and info.quantization is not None:
            return self._load_quantized(model, info, directory, load_format)
        stored = directory == self.directory and self._stored is not None
        chosen, checkpoint = self._resolved.quantization if stored else None, self._resolved.model_info.quantization
        experts = self._experts(info, expert_feature(chosen, checkpoint))
        return self._load(model, info, directory, load_format, self._stored if stored else None, experts)

    def _load(
        self,
        model: ModelClass,
        info: ModelInfo,
        directory: Path,
        load_format: str,
        quantization: Quantization | None,
        experts: ExpertsBackend | None,
    ) -> ModelArchitecture:
        _check_groups(info)
        check_ranks(info, self._mesh.tp.size, "the drafter's model")
        built = build_model(model, info, self._device, self.dtype, self._mesh, quantization, experts, may_be_plain=True)
        seed, shown = self._resolved.config.model.seed, self._mesh.tp.rank == 0
        load_weights(built, directory, load_format, seed, shown=shown)
        self._models.append(built)
        return built

    def _experts(self, info: ModelInfo, stored: Feature) -> ExpertsBackend | None:
        """Return the backend that was chosen for the target's experts, for a drafter's model with experts, whose weights it
        must multiply as they are ``stored``. If the target has none, the products of ``ops.experts`` are used. Raises
        ``ConfigError`` if the backend lacks a feature."""
        chosen = self._resolved.experts
        if info.expert_sizes is None or chosen is None:
            return None
        needs = {feature for feature in info.needs if feature.partition(".")[0] == str(chosen.spec.kind)}
        missing = {stored, *needs} - chosen.spec.offers
        if missing:
            raise ConfigError(
                f"the drafter's model needs {', '.join(sorted(missing))}, which experts {chosen.name!r} does not offer: select "
                "another backend of experts"
            )
        return chosen.build(ExpertsContext(self._device, self.dtype))

    def open(self, directory: Path, load_format: str) -> ModelArchitecture:
        """See ``DraftRuntime``."""
        component, info = draft_model(directory, self._resolved.models, self._resolved.config)
        served = self._resolved.config.model.context_len or info.context_len
        info = replace(info, context_len=min(info.context_len, served))
        return self._load_quantized(
            load_attribute(component.spec.target, component.label), info, directory, load_format
        )

    def _load_quantized(
        self, model: ModelClass, info: ModelInfo, directory: Path, load_format: str
    ) -> ModelArchitecture:
        """Load a drafter's checkpoint of its own, as ``info.quantization`` says. Raises ``ConfigError`` if no component can."""
        what = str(directory / "config.json")
        chosen = None if info.quantization is None else choose(self._resolved, info.quantization, info, what)
        names = names_reader(directory, load_format)
        context = QuantizationContext(info.quantization, self.dtype, self._device, tensor_names=names)
        quantization = None if chosen is None else chosen.build(context)
        experts = self._experts(info, expert_feature(chosen, info.quantization))
        return self._load(model, info, directory, load_format, quantization, experts)

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of the models that drafters have loaded."""
        return sum(module_bytes(as_module(model)) for model in self._models)

    def page_bytes(self, page_size: int, stores: KVStoreFactory) -> int:
        """Return the bytes that one page takes in all draft caches together."""
        groups = [group for cache in self._caches for group in cache.info.cache_groups]
        return sum(stores.page_bytes(group, page_size).page for group in groups)

    def allocate(self, inputs: Inputs, pages: DraftPages, stores: KVStoreFactory, max_context: int) -> None:
        """Allocate the draft caches."""
        for cache in self._caches:
            cache.allocate(self._resolved, inputs, pages, stores, self.dtype, max_context)

    @property
    def graphs(self) -> list[DraftGraphs]:
        """Return what captures the passes of drafters."""
        return [cache.graphs for cache in self._caches if cache.graphs is not None]


def _check_groups(info: ModelInfo) -> None:
    """Raise ``ConfigError`` if a drafter's model keeps states: the caches of drafters have pages only."""
    kinds = {group.kind for group in info.cache_groups}
    if CacheGroupKind.STATE in kinds:
        raise ConfigError(
            f"the drafter's model {info.architecture} has cache groups of kind {', '.join(sorted(kinds))}; models of drafters must "
            "keep keys and values or latents: select another drafter"
        )

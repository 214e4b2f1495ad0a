"""The engine: a model, its KV pool and its attention backends on one device. ``forward(batch)`` is a step."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dovetail.engine.build import as_module
from dovetail.engine.captures import (
    NEEDED_BEFORE_CAPTURE,
    Captures,
    K,
    capture_all,
    capture_next,
    ladder,
    try_capture,
)
from dovetail.engine.device import lost_device
from dovetail.engine.draft_runtime import EngineDraftRuntime
from dovetail.engine.dry_run import dry_run
from dovetail.engine.graphs import DecodeGraph, DecodeGraphs
from dovetail.engine.inputs import Inputs
from dovetail.engine.last import last_rows, narrows
from dovetail.engine.memory import Needs, budget_for, measure_peak, module_bytes
from dovetail.engine.node_rows import NodeRows
from dovetail.engine.outputs import fetched, host_output
from dovetail.engine.pieces import PiecewiseGraphs, launch_bound
from dovetail.engine.pieces import ladder as token_ladder
from dovetail.engine.pooling import pooled
from dovetail.engine.prompt_logprobs import prompt_logprobs
from dovetail.engine.sampler import Sampler, decode_numbers, verify_numbers
from dovetail.engine.verify import compact
from dovetail.engine.verify_graphs import OWN_LOGITS, VerifyGraphs, VerifyKey, VerifySizes
from dovetail.engine.weights import build_model, load_weights
from dovetail.errors import ConfigError
from dovetail.interfaces.attention import AttentionBackend, AttentionContext
from dovetail.interfaces.features import Feature
from dovetail.interfaces.speculative import Drafter, DrafterContext
from dovetail.layers.linear import make_batch_invariant
from dovetail.memory.pool import PagedKVPool, pool_dtype
from dovetail.memory.table import RequestTable
from dovetail.ops.linear import describe
from dovetail.types import Attends, ForwardOutput, HostOutput, Logprobs

if TYPE_CHECKING:
    from dovetail.config.sections import Config
    from dovetail.registry.resolver import Chosen, Resolved
    from dovetail.types import Batch, IntArray, PageUpdates

log = logging.getLogger(__name__)


class Engine:
    """Builds model, pool and backends from a resolved config, and runs batches on them."""

    lost_device = staticmethod(lost_device)

    def __init__(self, resolved: Resolved, eos_token_ids: frozenset[int]) -> None:
        config, info = resolved.config, resolved.model_info
        self.device = torch.device(resolved.machine.device)
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        dtype = getattr(torch, config.model.dtype)
        kv_dtype = dtype if config.memory.kv_dtype == "auto" else pool_dtype(config.memory.kv_dtype)
        if len(info.cache_groups) != 1:
            raise ConfigError(
                f"{info.architecture} declares {len(info.cache_groups)} cache groups; this engine runs one"
            )
        self.info = info
        self.context_len = min(info.context_len, config.model.context_len or info.context_len)
        self.model = build_model(resolved.model.load(), info, self.device, dtype)
        self._batch_invariant = config.batch_invariant
        if config.batch_invariant:
            make_batch_invariant(as_module(self.model))
        load_weights(self.model, resolved.model_dir, config.model.load_format, config.model.seed)
        runtime = self._draft_runtime = EngineDraftRuntime(resolved, self.model, self.device, dtype)
        self.drafter = self._build_drafter(resolved, runtime)
        self.watched = runtime.watched
        asked = config.graphs.piecewise_tokens
        self._piece_tokens = launch_bound(self.model) if asked is None else asked
        group = info.cache_groups[0]
        self.page_size = config.memory.page_size
        needs = self._measure(resolved, PagedKVPool(group, 2, self.page_size, kv_dtype, self.device), dtype)
        needs = replace(needs, weights=needs.weights + runtime.weight_bytes)
        beside = runtime.page_bytes(self.page_size, kv_dtype)
        self.budget = budget_for(config, group, kv_dtype, self.device, self.context_len, needs, beside)
        log.info("%s", self.budget)
        self.num_pages = self.budget.num_pages
        self.pool = PagedKVPool(group, self.num_pages, self.page_size, kv_dtype, self.device)
        self.context_len = min(self.context_len, (self.num_pages - 1) * self.page_size)
        max_pages = -(-self.context_len // self.page_size) + 1
        self.request_table = RequestTable(config.scheduler.rows, max_pages)
        self.inputs = Inputs(self.request_table.pages[0], self.page_size, self.device)
        runtime.allocate(self.inputs, self.pool, self.context_len)
        self.sampler = Sampler(info.vocab_size, eos_token_ids, self.device)
        self._prefill = self._attention(resolved.attention_prefill, dtype, self.pool, config.scheduler.rows)
        self._decode = self._attention(resolved.attention_decode, dtype, self.pool, config.scheduler.rows)
        self.shares_prefixes = _shares_prefixes(resolved)
        self.graphs = self._build_graphs(config) if config.graphs.decode is True else None
        self.verify_graphs: VerifyGraphs | None = None
        captured = self.graphs is not None and Feature.ATTN_VERIFY_GRAPH in resolved.attention_decode.spec.offers
        self._verify_config = config if captured else None
        self.pieces = self._build_pieces(config, dtype)
        self._needed: Counter[object] = Counter()
        self._graph: DecodeGraph | None = None  # that the last step ran in
        self._verifies: VerifyKey | None = None
        self._logits: torch.Tensor | None = None
        self._prompt_logprobs: list[tuple[int, IntArray, Logprobs]] = []
        self._pooled: list[tuple[int, torch.Tensor]] = []
        if self.drafter is not None and resolved.drafter is not None:
            self.expect_drafts(self.drafter.max_draft_tokens, trees=_captures_trees(resolved))

    def _build_drafter(self, resolved: Resolved, runtime: EngineDraftRuntime) -> Drafter | None:
        """The drafter, before the pool is there: its models and their caches take memory too."""
        if resolved.drafter is None:
            return None
        rows = resolved.config.scheduler.rows
        return resolved.drafter.build(
            DrafterContext(self.device, self.info.vocab_size, rows, self.context_len, runtime)
        )

    def _measure(self, resolved: Resolved, pool: PagedKVPool, dtype: torch.dtype) -> Needs:
        """What the largest step takes beside weights and pool, run over a pool of one page."""
        config, weights = resolved.config, module_bytes(as_module(self.model))
        if self.device.type == "cpu":
            return Needs(weights)
        rows = config.scheduler.rows
        whole, rest = divmod(config.scheduler.chunk, self.context_len)
        lens = [self.context_len] * whole + [rest] * (rest > 0) + [1] * (rows * config.scheduler.mixed)
        backend = self._attention(resolved.attention_prefill, dtype, pool, rows)
        peak = measure_peak(lambda: dry_run(self.model, backend, pool, lens, rows), self.device)
        return Needs(weights, peak, sum(lens), self._graph_bytes(resolved, dtype))

    def _graph_bytes(self, resolved: Resolved, dtype: torch.dtype) -> int:
        """What captured steps keep: logits of decode steps (usual, of another variant, with shared prefixes), of the largest
        verify step and the largest step of a drafter (as they are computed, and copied), of small verify steps (chains and trees),
        of pieces the queries of every layer and what is watched; a quarter more for the rest."""
        info, config = self.info, resolved.config
        rows = 3 * sum(ladder(min(config.scheduler.rows, config.graphs.max_rows)))
        if resolved.drafter is not None and self.drafter is not None:
            sizes = self._verify_sizes(config, self.drafter.max_draft_tokens, trees=_captures_trees(resolved))
            rows += 4 * config.graphs.max_rows
            rows += (1 + sizes.trees) * sum(size for size in sizes.counts if size <= OWN_LOGITS)
        logits = rows * info.vocab_size if config.graphs.decode is True else 0
        tokens = sum(token_ladder(self._piece_tokens))
        queries = tokens * (info.num_layers * info.num_heads * info.head_dim + len(self.watched) * info.hidden_size)
        return int((logits + queries) * dtype.itemsize * 1.25)

    def _build_graphs(self, config: Config) -> DecodeGraphs:
        rows = min(config.scheduler.rows, config.graphs.max_rows)
        shares = self.shares_prefixes
        graphs = DecodeGraphs(
            self.model, self.inputs, self.pool, self._decode, rows, self.context_len, shares, self.watched
        )
        if config.graphs.capture == "start":
            capture_all(graphs, "decode steps")
        return graphs

    def expect_drafts(self, most: int, *, trees: bool) -> None:
        """From now on rows may come with up to ``most`` drafts: chains, or ``trees``. Their steps are captured where decode
        steps are, if the attention backend offers attention.verify_graph."""
        config = self._verify_config
        if config is None:
            return
        sizes = self._verify_sizes(config, most, trees=trees)
        self.verify_graphs = VerifyGraphs(self.model, self.inputs, self.pool, self._decode, sizes, self.watched)
        if config.graphs.capture == "start":
            capture_all(self.verify_graphs, "verify steps")

    def _verify_sizes(self, config: Config, most: int, *, trees: bool) -> VerifySizes:
        width = 1 + most
        tokens = min(config.graphs.max_rows, config.scheduler.rows * width)
        return VerifySizes(tokens, width, trees, self.context_len)

    def _build_pieces(self, config: Config, dtype: torch.dtype) -> PiecewiseGraphs | None:
        if self.device.type != "cuda" or not self._piece_tokens:
            return None
        pieces = PiecewiseGraphs(self.model, self.pool, self._piece_tokens, dtype, self.watched)
        if config.graphs.capture == "start":
            capture_all(pieces, "steps with prompts")
        return pieces

    def _attention(self, chosen: Chosen, dtype: torch.dtype, pool: PagedKVPool, max_rows: int) -> AttentionBackend:
        info = self.info
        return chosen.build(
            AttentionContext(
                device=self.device,
                dtype=dtype,
                num_heads=info.num_heads,
                num_kv_heads=info.num_kv_heads,
                head_dim=info.head_dim,
                pool=pool,
                max_rows=max_rows,
                max_context=self.context_len,
                batch_invariant=self._batch_invariant,
            )
        )

    @property
    def products(self) -> dict[str, str]:
        """What computes the matrix products of the model, by the shape of the weight."""
        weights = {tuple(p.shape): p for p in as_module(self.model).parameters() if p.ndim == 2}
        return {
            f"{rows} x {columns}": describe(weight, batch_invariant=self._batch_invariant)
            for (rows, columns), weight in weights.items()
        }

    def forward(self, batch: Batch) -> ForwardOutput:
        """Launch the forward pass and sample from it."""
        self.launch(batch)
        return self.sample(batch)

    @torch.inference_mode()
    def launch(self, batch: Batch) -> None:
        """Compute the step's logits, and set the batch's engine fields. Under overlap the host reads the last step's tokens while
        this runs."""
        self._graph, self._prompt_logprobs, self._pooled = None, [], []
        self._verifies = key = self._verify_key(batch)
        if key is not None:  # first: the host waits for steps with drafts, which come one by one
            assert self.verify_graphs is not None
            numbers = verify_numbers(batch, self.sampler.settings_of(batch))
            self._logits = self.verify_graphs.launch(key, batch, numbers)
            return
        backend = self._prefill if batch.num_extend else self._decode
        if batch.shared is not None and not (self.shares_prefixes and backend.shares(batch)):
            batch.shared = None
        if not batch.num_extend and batch.drafts is None:
            batch.variant = backend.variant(batch)
        self._graph = self._graph_for(batch)
        if self._graph is not None:
            assert self.graphs is not None
            numbers = decode_numbers(batch, self.sampler.settings_of(batch))
            self._logits = self.graphs.launch(self._graph, batch, numbers)
            batch.input_ids = self._graph.tensors.input_ids[: len(batch.slots)]  # penalties count them
            if self.watched:
                assert self._graph.batch.hidden is not None
                batch.hidden = self._graph.batch.hidden[: len(batch.slots)]
            return
        self.inputs.prepare(batch)
        attends: Attends = backend
        if self._batch_invariant and batch.tree_mask is not None:
            attends = NodeRows(backend, batch)
        else:
            backend.plan(batch)
        batch.attn, batch.kv, batch.watch = (attends,), (self.pool,), self.watched
        hidden = self._forward(batch, attends)
        self._prompt_logprobs = prompt_logprobs(self.model, batch, hidden)
        self._pooled = pooled(self.model, batch, hidden)
        whole = batch.logit_rows is None or batch.last is not None
        self._logits = self.model.logits(hidden if whole else hidden[batch.logit_rows])

    def _graph_for(self, batch: Batch) -> DecodeGraph | None:
        if self.graphs is None or batch.num_extend or batch.drafts is not None or not batch.samples.all():
            return None
        key = self.graphs.key_for(batch)
        return self.graphs.get(key) if key is not None and self._is_ready(self.graphs, key) else None

    def _verify_key(self, batch: Batch) -> VerifyKey | None:
        graphs = self.verify_graphs
        if graphs is None or batch.num_extend or batch.drafts is None:
            return None
        key = graphs.key_for(batch)
        return key if key is not None and self._is_ready(graphs, key) else None

    def _forward(self, batch: Batch, attends: Attends) -> torch.Tensor:
        """Hidden states of a planned batch, by captured pieces where its size has been needed often enough."""
        pieces = self.pieces
        size = pieces.size_for(len(batch.input_ids)) if pieces is not None else None
        if pieces is not None and size is not None and self._is_ready(pieces, size):
            return pieces.forward(size, batch, attends)
        whole = max(self.watched, default=0) >= self.info.num_layers
        if Feature.MODEL_LAST_ROWS in self.info.offers and not whole and narrows(batch):
            batch.last = last_rows(batch, self._decode)
        return self.model.forward(batch)

    def _is_ready(self, graphs: Captures[K], key: K) -> bool:
        """True if ``key`` is captured, now at the latest where it has been needed often enough for that to pay."""
        if graphs.is_captured(key):
            return True
        needed = id(graphs), key
        self._needed[needed] += 1
        return self._needed[needed] >= NEEDED_BEFORE_CAPTURE and key not in graphs.refused and try_capture(graphs, key)

    @torch.inference_mode()
    def sample(self, batch: Batch) -> ForwardOutput:
        """Choose the tokens of the step just launched, keep the last of each row on the device for the next step, and
        move the KV of accepted tree drafts to where their positions belong."""
        assert self._logits is not None, "sample follows launch"
        logits, self._logits = self._logits, None
        output = self._replayed(batch)
        if output is None:
            output = self.sampler.sample(batch, logits)
            output.prompt_logprobs, output.pooled = self._prompt_logprobs, self._pooled
            self.inputs.keep_last(batch, output.token_ids)
        if batch.tree_mask is not None:
            compact(batch, output, self.pool)
        if self.device.type == "cuda":
            output.on_host = output.on_host or fetched(output)
            output.event = torch.cuda.Event()
            output.event.record()
        return output

    def _replayed(self, batch: Batch) -> ForwardOutput | None:
        """The tokens of a captured step by a captured sampler. None where there is none, or rows want more than it does."""
        settings = self.sampler.settings_of(batch)
        if not settings.simple:
            return None
        if self._verifies is not None:
            assert self.verify_graphs is not None
            return self.verify_graphs.sample(self._verifies, batch, settings)
        if self._graph is None:
            return None
        assert self.graphs is not None
        tokens = self.graphs.sample(self._graph, settings)
        return None if tokens is None else ForwardOutput(tokens[: len(batch.slots), None])

    def locate_updates(self, updates: PageUpdates) -> None:
        """Prepare page updates of the next step while the device computes this one. The next step may have others."""
        self.inputs.locate_updates(updates)

    def wait(self, batch: Batch, output: ForwardOutput) -> HostOutput:
        """A step's output on the host: the one place where the host waits for the device."""
        if output.event is not None:
            output.event.synchronize()
            if self.verify_graphs is not None:
                self.verify_graphs.computed(batch)
        return host_output(batch, output.on_host or output)

    def idle(self) -> bool:
        """Do a little of what can wait until nothing else is to be done: capture a graph. False if nothing is left."""
        return (
            (self.graphs is not None and capture_next(self.graphs))
            or (self.verify_graphs is not None and capture_next(self.verify_graphs))
            or self._draft_runtime.capture_next()
            or (self.pieces is not None and capture_next(self.pieces))
        )


def _captures_trees(resolved: Resolved) -> bool:
    """Whether there are trees, and graphs of their steps: with ``batch_invariant`` the rows of attention are made by the host."""
    drafter = resolved.drafter
    return drafter is not None and Feature.DRAFT_TREE in drafter.spec.offers and not resolved.config.batch_invariant


def _shares_prefixes(resolved: Resolved) -> bool:
    """Whether decode rows are worth ordering by what they share: config says so, somebody knows it, somebody makes use of it,
    every layer reads the whole past, rows have one query each, and bits may depend on what others share."""
    return (
        resolved.config.scheduler.shared_prefixes
        and not resolved.config.batch_invariant
        and resolved.drafter is None
        and Feature.CACHE_SHARED_PREFIXES in resolved.cache.spec.offers
        and Feature.ATTN_SHARED_PREFIX in resolved.attention_decode.spec.offers
        and Feature.ATTN_SLIDING_WINDOW not in resolved.model_info.needs
    )

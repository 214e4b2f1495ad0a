"""Measure the memory that an engine needs outside its KV pool: weights, activations of the largest step, captured
graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dovetail.engine.build import as_module
from dovetail.engine.captures import ladder
from dovetail.engine.dry_run import dry_run, representative_layers
from dovetail.engine.expansion import Expansion
from dovetail.engine.memory import Needs, measure_peak, module_bytes
from dovetail.engine.pieces import token_ladder
from dovetail.engine.verify_graphs import OWN_LOGITS, VerifySizes
from dovetail.interfaces.features import Feature

if TYPE_CHECKING:
    from collections.abc import Callable

    from dovetail.config.sections import Config
    from dovetail.engine.adapters import EngineAdapters
    from dovetail.engine.grouped import Pools
    from dovetail.interfaces.attention import AttentionBackend
    from dovetail.interfaces.model import ModelArchitecture, ModelInfo
    from dovetail.registry.resolver import Resolved

PIECES_SHARE = 0.1
"""The largest part of the memory for KV pool and graphs that captured pieces take, unless ``graphs.piecewise_tokens`` is
set. Without this bound those of Qwen3-30B-A3B would take 5.7 GiB, which is most of what its weights leave free of 80 GB."""


@dataclass(frozen=True, slots=True)
class GraphNeeds:
    """Describe the numbers on which the memory of graphs depends. ``draft_tokens`` is the largest number of drafts of a
    row, ``watched`` the number of layers whose hidden states a drafter reads, ``piece_tokens`` the number of tokens of
    the largest step that is captured in pieces, and ``itemsize`` the bytes of a number."""

    draft_tokens: int
    watched: int
    piece_tokens: int
    itemsize: int


def measure_needs(
    resolved: Resolved,
    model: ModelArchitecture,
    local: ModelInfo,
    pool: Pools,
    context_len: int,
    attention: Callable[[], AttentionBackend],
    graphs: GraphNeeds,
    adapters: EngineAdapters | None = None,
) -> Needs:
    """Run the largest step over ``pool``, which has one page besides page 0, or as many of its layers as ``representative_layers``
    says. Return the memory that it takes in addition to weights and pool, expanded latents included, and an estimate of what graphs will take. With ``adapters``, the step runs
    without and with an active adapter, and the larger number counts. On a CPU only the weights are counted.
    ``local`` describes this rank's share of the model, and ``attention`` builds the backend that attends in steps with
    prompts."""
    config, weights = resolved.config, module_bytes(as_module(model))
    if pool.device.type == "cpu":
        return Needs(weights)
    rows = config.scheduler.rows
    whole, rest = divmod(config.scheduler.chunk, context_len)
    lens = [context_len] * whole + [rest] * (rest > 0) + [1] * (rows * config.scheduler.mixed)
    backend, layers = attention(), representative_layers(model)
    if config.metrics.expert_load is not None:  # routers of all layers keep what they have chosen
        layers = None

    def largest_steps() -> None:
        dry_run(model, backend, pool, lens, rows, layers)
        if adapters is not None:
            with adapters.rehearsed(sum(lens), rows):
                dry_run(model, backend, pool, lens, rows, layers)

    peak = measure_peak(largest_steps, pool.device)
    expansion = Expansion.of(resolved, model)
    if expansion is not None:  # the step that was measured had no prefix
        peak += expansion.needed_bytes(rows * context_len)
    return Needs(weights, peak, sum(lens), _graph_bytes(resolved, local, context_len, graphs))


def _graph_bytes(resolved: Resolved, info: ModelInfo, context_len: int, graphs: GraphNeeds) -> int:
    """Return an estimate of the bytes that captured steps keep. It counts the logits of decode steps three times (the
    default variant, another variant, shared prefixes). For a drafter it adds two sets of logits for the largest verify
    step and two for the drafter's largest step (as computed, and a copy), and the logits of small verify steps (chains
    and trees). It adds one set of logits in float32 for the largest decode step, to which penalties are applied. For
    pieces it adds the queries of every layer and the watched hidden states. A quarter is added for the
    rest."""
    config = resolved.config
    rows = 3 * sum(ladder(min(config.scheduler.rows, config.graphs.max_rows)))
    kept = 0
    if resolved.drafter is not None:
        sizes = verify_sizes(config, graphs.draft_tokens, context_len, trees=captures_trees(resolved))
        rows += 4 * config.graphs.max_rows
        rows += (1 + sizes.trees) * sum(size for size in sizes.counts if size <= OWN_LOGITS)
        kept = sum(sizes.counts) * _kept_by_states(info)  # for ``StepStates.advance``
    rows += min(config.scheduler.rows, config.graphs.max_rows) * 4 // graphs.itemsize
    logits = rows * info.vocab_size + kept if config.graphs.decode is True else 0
    queries = sum(token_ladder(graphs.piece_tokens)) * _kept_by_pieces(info, graphs.watched)
    return int((logits + queries) * graphs.itemsize * 1.25)


def _kept_by_pieces(info: ModelInfo, watched: int) -> int:
    """Return the count of numbers that captured pieces keep for each token: the queries of every layer and the watched
    hidden states."""
    return info.num_layers * info.num_heads * info.head_dim + watched * info.hidden_size + _kept_by_states(info)


def _kept_by_states(info: ModelInfo) -> int:
    """Return an estimate of the count of numbers that captured steps keep for each token in layers with states: the inputs
    of their operations. Those are as many as the channels of the layer's first state, three times: as projected, with gates,
    and convolved."""
    return sum(3 * group.num_layers * group.states[0].shape[0] for group in info.cache_groups if group.states)


def affordable_pieces(info: ModelInfo, graphs: GraphNeeds, memory: float) -> int:
    """Return the largest number of tokens, at most ``graphs.piece_tokens``, with which the captured pieces of all sizes
    take at most ``PIECES_SHARE`` of ``memory`` bytes. ``info`` describes this rank's share of the model."""
    token = _kept_by_pieces(info, graphs.watched) * graphs.itemsize * 1.25
    sizes = token_ladder(graphs.piece_tokens)
    fitting = (size for size in reversed(sizes) if sum(token_ladder(size)) * token <= memory * PIECES_SHARE)
    return next(fitting, 0)


def verify_sizes(config: Config, draft_tokens: int, context_len: int, *, trees: bool) -> VerifySizes:
    """Return the sizes of the verify steps to capture, if rows have up to ``draft_tokens`` drafts."""
    width = 1 + draft_tokens
    tokens = min(config.graphs.max_rows, config.scheduler.rows * width)
    return VerifySizes(tokens, width, trees, context_len)


def captures_trees(resolved: Resolved) -> bool:
    """Return True if verify steps with trees are captured. With ``batch_invariant`` they are not, because the host then
    makes a separate row for each node (see ``node_rows``)."""
    drafter = resolved.drafter
    return drafter is not None and Feature.DRAFT_TREE in drafter.spec.offers and not resolved.config.batch_invariant

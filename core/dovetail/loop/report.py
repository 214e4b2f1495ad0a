"""What a loop says of itself: numbers for /metrics, and what it is made of for /server_info."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dovetail.engine.pooling import default_pooling
from dovetail.interfaces.features import Feature
from dovetail.messages import EngineStats
from dovetail.ops.cpu.library import library

if TYPE_CHECKING:
    from dovetail.engine.engine import Engine
    from dovetail.registry.resolver import Resolved
    from dovetail.scheduler.scheduler import Scheduler


def stats_of(
    scheduler: Scheduler, seconds: Mapping[str, float], steps: int, drafter_errors: int, call_id: str
) -> EngineStats:
    """Gauges now, totals since the start. ``seconds`` has those of a step's parts, and of ``step`` as a whole."""
    ledger, totals, grammars = scheduler.ledger, scheduler.totals, scheduler.constraints
    return EngineStats(
        call_id=call_id,
        running=len(scheduler.prefilling) + len(scheduler.decoding),
        waiting=len(scheduler.waiting),
        pages_total=ledger.allocator.num_total,
        pages_used=ledger.allocator.num_total - ledger.available - scheduler.pins.count_unread(scheduler.running),
        pages_cached=ledger.cache.total_pages,
        pages_pinned=scheduler.pins.pages,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        generated_tokens=totals.generated_tokens,
        steps=steps,
        retractions=totals.retractions,
        drafted_tokens=totals.drafted_tokens,
        accepted_tokens=totals.accepted_tokens,
        draft_steps=totals.draft_steps,
        verify_steps=totals.verify_steps,
        drafter_errors=drafter_errors,
        jumped_tokens=totals.jumped_tokens,
        pins_taken=totals.pins_taken,
        pins_dropped=totals.pins_dropped,
        pins_expired=totals.pins_expired,
        grammar_compiles=grammars.totals.compiles,
        grammar_hits=grammars.totals.hits,
        grammar_misses=grammars.totals.misses,
        grammar_refusals=grammars.totals.refusals,
        grammar_overruns=grammars.totals.overruns,
        grammar_evictions=grammars.evictions,
        grammar_cached_bytes=grammars.cached_bytes,
        grammar_compile_seconds=grammars.totals.seconds,
        grammar_requests=dict(grammars.totals.backends),
        step_seconds=seconds["step"],
        schedule_seconds=seconds["schedule"],
        launch_seconds=seconds["launch"],
        wait_seconds=seconds["wait"],
        commit_seconds=seconds["commit"],
        draft_seconds=seconds["draft"],
        mask_seconds=seconds["mask"],
        verify_seconds=seconds["verify"],
    )


def info_of(resolved: Resolved, engine: Engine, overlap: bool) -> dict[str, Any]:
    """The engine's device, memory, graphs and parts, as JSON."""
    return {
        "architecture": engine.info.architecture,
        "device": str(engine.device),
        "cpu_kernels": library().text if engine.device.type == "cpu" else None,
        "products": engine.products,
        "context_len": engine.context_len,
        "page_size": engine.page_size,
        "num_pages": engine.num_pages - 1,
        "memory": engine.budget.to_json(),
        "overlap": overlap,
        "graphs": engine.graphs is not None and engine.graphs.sizes,
        "verify_graphs": engine.verify_graphs is not None and engine.verify_graphs.sizes,
        "embedding": _embedding(resolved, engine),
        "resolved": resolved.to_json(),
    }


def _embedding(resolved: Resolved, engine: Engine) -> dict[str, Any] | None:
    """The size of embeddings and how they are pooled unless a request says so; None of a model that has none."""
    if Feature.MODEL_EMBED not in engine.info.offers:
        return None
    return {"size": engine.info.hidden_size, "pooling": default_pooling(resolved.model_dir)}

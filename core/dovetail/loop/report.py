"""Describe a loop: numbers for /metrics, and its components for /server_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.engine.pooling import default_pooling
from dovetail.interfaces.features import Feature
from dovetail.messages import EngineStats
from dovetail.ops.cpu.library import library

if TYPE_CHECKING:
    from dovetail.engine.engine import Engine
    from dovetail.engine.warmup import WarmUpProgress
    from dovetail.loop.verbs import StepTimes
    from dovetail.registry.resolver import Resolved
    from dovetail.scheduler.scheduler import Scheduler


def stats_of(
    scheduler: Scheduler,
    times: StepTimes,
    mask_seconds: float,
    drafter_errors: int,
    call_id: str,
    warm_up: WarmUpProgress,
) -> EngineStats:
    """Return the current values of gauges, and totals since the start."""
    pages, totals, grammars = scheduler.page_counts(), scheduler.totals, scheduler.constraints
    return EngineStats(
        call_id=call_id,
        running=len(scheduler.prefilling) + len(scheduler.decoding),
        waiting=len(scheduler.waiting),
        pages_total=pages.total,
        pages_used=pages.used,
        pages_cached=pages.cached,
        pages_pinned=pages.pinned,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        generated_tokens=totals.generated_tokens,
        steps=times.steps,
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
        step_seconds=times.step,
        schedule_seconds=times.schedule,
        launch_seconds=times.launch,
        wait_seconds=times.wait,
        commit_seconds=times.commit,
        draft_seconds=times.draft,
        mask_seconds=mask_seconds,
        verify_seconds=times.verify,
        **warm_up._asdict(),
    )


def info_of(resolved: Resolved, engine: Engine, overlap: bool) -> dict[str, Any]:
    """Return the engine's device, memory, graphs and components, as JSON."""
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
        "kernel_cache": engine.warm_up.kernel_cache,
        "warm_up": engine.progress._asdict(),
        "embedding": _embedding(resolved, engine),
        "resolved": resolved.to_json(),
    }


def _embedding(resolved: Resolved, engine: Engine) -> dict[str, Any] | None:
    """Return the size of embeddings and the kind of pooling that applies unless a request sets another, or None if the
    model has no embeddings."""
    if Feature.MODEL_EMBED not in engine.info.offers:
        return None
    return {"size": engine.info.hidden_size, "pooling": default_pooling(resolved.model_dir)}

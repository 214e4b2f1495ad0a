"""Describe a loop: numbers for /metrics, and its components for /server_info."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dovetail.messages import EngineStats

if TYPE_CHECKING:
    from dovetail.interfaces.executor import StepVerbs, WarmUpProgress
    from dovetail.loop.verbs import Verbs
    from dovetail.registry.resolver import Resolved
    from dovetail.scheduler.scheduler import Scheduler


def stats_of(
    scheduler: Scheduler, verbs: Verbs, drafter_errors: int, call_id: str, warm_up: WarmUpProgress
) -> EngineStats:
    """Return the current values of gauges, and totals since the start."""
    times = verbs.times
    pages, totals, grammars = scheduler.page_counts(), scheduler.totals, scheduler.constraints
    return EngineStats(
        call_id=call_id,
        paused=int(verbs.paused),
        running=len(scheduler.prefilling) + len(scheduler.decoding),
        waiting=len(scheduler.waiting),
        compiling=grammars.num_compiling,
        pages_total=pages.total,
        pages_used=pages.used,
        pages_cached=pages.cached,
        pages_pinned=pages.pinned,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        group_cached_tokens=list(totals.group_cached_tokens),
        group_limited=list(totals.group_limited),
        generated_tokens=totals.generated_tokens,
        steps=times.steps,
        retractions=totals.retractions,
        drafted_tokens=totals.drafted_tokens,
        accepted_tokens=totals.accepted_tokens,
        draft_steps=totals.draft_steps,
        verify_steps=totals.verify_steps,
        drafter_errors=drafter_errors,
        policy_errors=totals.policy_errors,
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
        mask_seconds=grammars.mask_seconds,
        verify_seconds=times.verify,
        **warm_up._asdict(),
        **scheduler.adapters.stats(),
    )


def info_of(resolved: Resolved, executor: StepVerbs, overlap: bool) -> dict[str, Any]:
    """Return the engine's device, memory, graphs and components, as JSON."""
    rows = resolved.config.scheduler.rows
    return {**executor.describe(), "overlap": overlap, "max_running": rows, "resolved": resolved.to_json()}

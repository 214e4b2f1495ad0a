"""Build the scheduler of a loop, and the service that compiles constraints, from the resolved components."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING

from dovetail.constraints.backend_choice import GrammarRecipe
from dovetail.constraints.compilers import Compiler, ProcessCompiler, ThreadCompiler
from dovetail.constraints.mask_budget import MaskBudget
from dovetail.constraints.requests import RequestConstraints
from dovetail.constraints.service import GrammarService
from dovetail.engine.processors import params_class
from dovetail.interfaces.cache import CacheContext, CacheGroupKind, GroupDescriptor
from dovetail.interfaces.features import Feature
from dovetail.interfaces.grammar import GrammarContext
from dovetail.interfaces.policy import PolicyContext
from dovetail.interfaces.state_rows import CHUNK
from dovetail.memory.allocator import PageAllocator
from dovetail.memory.arena import ArenaAllocator
from dovetail.memory.ledger import PageLedger
from dovetail.memory.lookahead import with_lookahead
from dovetail.memory.pools import PoolCaches, PoolLedgers
from dovetail.memory.table import RequestTable
from dovetail.scheduler.limits import ProcessorEntry, SchedulerLimits
from dovetail.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from dovetail.interfaces.executor import ExecutorInfo, StepVerbs
    from dovetail.registry.resolution import Chosen
    from dovetail.registry.resolver import Resolved
    from dovetail.tokenizer import Tokenizer


def build_constraints(resolved: Resolved, tokenizer: Tokenizer | None, eos: frozenset[int]) -> RequestConstraints:
    """Build the object that compiles the constraints of requests, with the grammar backends that were resolved."""
    jump_tokenizer = tokenizer if resolved.config.grammar.jump_forward else None
    service = _build_service(resolved, tokenizer, eos)
    return RequestConstraints(service, resolved.model_info.vocab_size, eos, jump_tokenizer, tokenizer)


def _build_service(resolved: Resolved, tokenizer: Tokenizer | None, eos: frozenset[int]) -> GrammarService:
    """Build the compile service. Without grammar backends or a tokenizer, it refuses every constraint and reports
    why."""
    if not resolved.grammars:
        return GrammarService(None, reason="no grammar backend is selected or usable; see `dovetail explain`")
    if tokenizer is None:
        return GrammarService(None, reason="the model was loaded without a tokenizer")
    context = GrammarContext(resolved.model_info.vocab_size, tokenizer.token_bytes, tuple(sorted(eos)), tokenizer.json)
    section = resolved.config.grammar
    automatic = {candidate.kind for candidate in section.candidates}
    recipes = [_recipe(chosen, automatic) for chosen in resolved.grammars]
    budget = MaskBudget(section.mask_ms / 1000, section.mask_burst_ms / 1000)
    if section.isolation == "process":
        compiler: Compiler = ProcessCompiler(
            recipes,
            context,
            seconds=section.timeout,
            memory=section.memory_mib * 2**20,
            budget=budget,
            stall_seconds=section.stall_seconds,
            processes=section.workers + 1,
        )
    else:
        compiler = ThreadCompiler([recipe.engine(context) for recipe in recipes], section.timeout)
    return GrammarService(compiler, workers=section.workers, cache_bytes=section.cache_mib * 2**20, budget=budget)


def _recipe(chosen: Chosen, automatic: Container[str]) -> GrammarRecipe:
    spec = chosen.spec
    return GrammarRecipe(
        spec.name, chosen.component.label, spec.target, chosen.config, spec.offers, spec.name in automatic
    )


def _descriptors(resolved: Resolved, engine: ExecutorInfo) -> tuple[GroupDescriptor, ...]:
    """Return the cache groups of the model for prefix cache and ledger. If the engine has a page for every token, or the
    cache has no sliding groups, they are full."""
    slides = not engine.keeps_all and Feature.CACHE_GROUPS in resolved.cache.spec.offers
    arena = engine.arena
    sizes = (
        [1] * len(resolved.model_info.cache_groups)
        if arena is None
        else [arena.slab_bytes // pages for pages in arena.pages]
    )
    return tuple(
        GroupDescriptor(group.kind, group.window, size)
        if slides or group.kind is not CacheGroupKind.SLIDING
        else GroupDescriptor(num_bytes=size)
        for group, size in zip(resolved.model_info.cache_groups, sizes, strict=True)
    )


def build_scheduler(
    resolved: Resolved,
    executor: StepVerbs,
    constraints: RequestConstraints,
    tokenizer: Tokenizer | None,
    eos: frozenset[int],
) -> Scheduler:
    """Build the scheduler, with a page ledger for each pool of the executor."""
    section, model, engine = resolved.config.scheduler, resolved.model_info, executor.info
    mixer = resolved.mixer
    ahead, page_size = engine.tokens_ahead, engine.page_size
    groups = _descriptors(resolved, engine)
    table = RequestTable(executor.page_table, engine.num_pools)
    members: list[PageLedger] = []
    for pool in range(engine.num_pools):
        cache = with_lookahead(resolved.cache.build, CacheContext(page_size, groups), ahead)
        if engine.arena is not None:
            allocator = ArenaAllocator(engine.arena)
        else:
            allocator = PageAllocator(engine.num_pages, len(groups))
        members.append(PageLedger(allocator, cache, table, page_size, ahead, groups, pool))
    ledger = members[0] if len(members) == 1 else PoolLedgers(members, table)
    limits = SchedulerLimits(
        max_running=section.rows,
        max_waiting=section.max_waiting,
        chunk_size=section.chunk,
        context_len=engine.context_len,
        vocab_size=model.vocab_size,
        mixed=section.mixed,
        reuses_prefixes=Feature.CACHE_REUSE in resolved.cache.spec.offers,
        tenants_step_seconds=section.tenants_step_ms / 1000,
        wait_for_prefix=section.wait_for_prefix,
        shared_prefixes=engine.shares_prefixes,
        draft_width=engine.draft_width,
        draft_trees=resolved.drafter is None or Feature.DRAFT_TREE in resolved.drafter.spec.offers,
        fails_late=engine.fails_late,
        adapt_drafts=section.draft == "adaptive",
        min_draft_probability=section.min_draft_probability,
        embeds=Feature.MODEL_EMBED in model.offers,
        pin_seconds=section.pin_seconds,
        processors={
            chosen.name: ProcessorEntry(params_class(chosen), Feature.LOGITS_DRAFTS in chosen.spec.offers)
            for chosen in resolved.logits_processors
        },
        adapter_slots=resolved.config.adapters.max_resident if resolved.config.adapters.enabled else 0,
        pin_pages=int(section.pin_fraction * (engine.num_pages - 1)),
        state_snapshot_tokens=resolved.config.memory.state_snapshot_tokens,
        state_chunk=CHUNK if mixer is not None and Feature.MIXER_SNAPSHOTS in mixer.spec.offers else 0,
    )
    caches = [member.cache for member in members]
    policy = resolved.policy.build(PolicyContext(caches[0] if len(caches) == 1 else PoolCaches(caches)))
    return Scheduler(limits, ledger, policy, constraints, tokenizer, eos)

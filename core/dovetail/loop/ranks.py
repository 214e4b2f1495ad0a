"""Build the engines of ranks, in this process or in the processes that an executor starts."""

from __future__ import annotations

import logging
import pickle
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dovetail.engine.adaptive_threads import adaptive_threads
from dovetail.engine.device import EngineStream, explained
from dovetail.engine.engine import Engine
from dovetail.engine.mesh import connect, rank_device
from dovetail.engine.plans import PlanRunner
from dovetail.interfaces.executor import ExecutorContext
from dovetail.registry.loader import load_plugins
from dovetail.registry.machine import Machine
from dovetail.registry.ranks import expert_division
from dovetail.registry.resolver import resolve

if TYPE_CHECKING:
    from dovetail.interfaces.executor import Executor, RankEngine
    from dovetail.registry.resolver import Resolved


def build_executor(resolved: Resolved, eos_token_ids: frozenset[int]) -> Executor:
    """Build the executor that was resolved, with the engines of all its ranks. Raises what building an engine raises."""
    config = resolved.config
    context = ExecutorContext(
        size=config.parallel.tp,
        build_rank=partial(_build_here, resolved, eos_token_ids),
        target=f"{__name__}:{build_rank.__name__}",
        description=pickle.dumps((config, eos_token_ids)),
        log_level=logging.getLevelName(logging.getLogger("dovetail").getEffectiveLevel()).lower(),
    )
    return resolved.executor.build(context)


def build_rank(description: bytes, rank: int, size: int, rendezvous: str) -> RankEngine:
    """Build the engine of a rank in a process of its own. See ``ExecutorContext``: ``description`` is what
    ``build_executor`` has put there."""
    config, eos_token_ids = pickle.loads(description)
    resolved = resolve(config, load_plugins(config.plugins), Machine.detect(config.device))
    return _runner(resolved, eos_token_ids, rank, size, rendezvous, mirrors_pages=True)


def _build_here(resolved: Resolved, eos_token_ids: frozenset[int], rank: int, size: int, rendezvous: str) -> RankEngine:
    return _runner(resolved, eos_token_ids, rank, size, rendezvous, mirrors_pages=False)


def _runner(
    resolved: Resolved, eos_token_ids: frozenset[int], rank: int, size: int, rendezvous: str, *, mirrors_pages: bool
) -> PlanRunner:
    device = rank_device(resolved.machine.device, rank)
    experts = expert_division(resolved.config.parallel.experts, resolved.model_info, size)
    attention = resolved.config.parallel.attention
    mesh = connect(rank, size, device, Path(urlsplit(rendezvous).path), experts=experts, attention=attention)
    with explained(resolved.config):
        stream = EngineStream(device)
        with stream:
            engine = Engine(resolved, eos_token_ids, mesh)
    adaptive = adaptive_threads(resolved.config.threads, device, size)
    if adaptive is None:
        return PlanRunner(engine, stream, mirrors_pages=mirrors_pages)
    return PlanRunner(engine, adaptive, threads=str(adaptive), mirrors_pages=mirrors_pages)
